"""Workers as they register, and a router's view of them, without any network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import cast

from kvloop.common.v1 import common_pb2
from kvloop.kvmeta.v1 import registry_pb2
from services.router.breaker import BreakerLimits
from services.router.deadline import Clock
from services.router.policies import POLICIES, PolicyName
from services.router.policy import Rng
from services.router.routing import Routes
from services.router.worker_client import WorkerClient
from services.router.workers import WorkerPool

MODEL = "model"
PREFILL, DECODE = common_pb2.WORKER_ROLE_PREFILL, common_pb2.WORKER_ROLE_DECODE


def make_worker(worker_id: str, role: common_pb2.WorkerRole.ValueType) -> registry_pb2.Worker:
    """A worker with the traits of a common deployment."""
    traits = registry_pb2.EngineTraits(
        vllm_version="0.32.0",
        contract_version=1,
        block_size=16,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        data_parallel_size=1,
        kv_connector="KvloopConnector",
        kv_buffer_device="cuda",
        side_channel_host="10.0.0.1",
        side_channel_port=5600,
        max_model_len=131_072,
        num_kv_blocks=10_240,
        bidirectional_kv_xfer=True,
        kv_recompute_threshold=64,
        lease_renewal=True,
        kv_cache_dtype="auto",
        nixl_version="1.5.1",
        kv_block_bytes=4 * 1024 * 1024,
    )
    traits.decoder_kv_blocks_ttl.FromSeconds(480)
    traits.pin_lease.FromSeconds(60)
    return registry_pb2.Worker(
        worker_id=worker_id,
        role=role,
        address="10.0.0.1:7300",
        model=MODEL,
        engine=common_pb2.EngineRef(engine_id=f"{worker_id}-engine", epoch="1"),
        traits=traits,
        state=registry_pb2.Worker.STATE_ACTIVE,
    )


def make_fleet(prefill: int, decode: int) -> list[registry_pb2.Worker]:
    """So many workers of each role."""
    return [
        *(make_worker(f"prefill-{place}", PREFILL) for place in range(prefill)),
        *(make_worker(f"decode-{place}", DECODE) for place in range(decode)),
    ]


@asynccontextmanager
async def router_view(
    workers: Sequence[registry_pb2.Worker], policy: PolicyName, *, clock: Clock, rng: Rng
) -> AsyncIterator[tuple[WorkerPool, Routes]]:
    """What one router knows of the workers, and how it chooses."""

    @asynccontextmanager
    async def nowhere(worker: registry_pb2.Worker) -> AsyncIterator[WorkerClient]:
        yield cast(WorkerClient, None)  # nothing is sent

    async with asyncio.TaskGroup() as tasks:
        pool = WorkerPool(
            tasks,
            clock=clock,
            breakers=BreakerLimits(failures=5, cooldown_seconds=2, max_cooldown_seconds=30),
            grace_seconds=30,
            connect=nowhere,
        )
        for worker in workers:
            await pool.put(worker)
        yield pool, Routes(pool, POLICIES[policy], clock=clock, rng=rng)
        await pool.aclose()
