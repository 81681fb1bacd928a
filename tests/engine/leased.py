"""A decode engine whose leases are short, and which outlives its sidecar."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from kvloop import rpc
from kvloop.kvmeta.v1 import ledger_pb2, ledger_pb2_grpc
from kvloop.stack.ports import PortPool
from kvloop.stack.readiness import lists_model
from services.worker.launcher import launch
from tests.engine.attached import AttachedSidecar, engine_settings
from tests.engine.engine_link import EngineLink
from tests.engine.engines import EngineProbe, eventually, open_session
from tests.engine.world import MODEL, World

LEASE_SECONDS = 20
RETENTION_SECONDS = 600
"""Longer than the tests of a file take, on a busy machine, too."""
NUM_BLOCKS = 640
"""Few, so that conversations of a test's size fill them."""
WORKER_ID = "decode-leased"
PATIENT = ("--event-timeout-seconds=10", "--commit-timeout-seconds=10")
"""Flags of a decode sidecar that retains turns on a busy machine, too."""


class LeasedDecode:
    """The engine and its sidecar. Made by `leased_decode`.

    Attributes:
        probe: the engine itself.
        link: the sidecar's way to it.
        sidecar: goes and comes as tests want it.
        engine_pid: ancestor of the engine's processes.
    """

    def __init__(
        self,
        world: World,
        probe: EngineProbe,
        link: EngineLink,
        sidecar: AttachedSidecar,
        engine_pid: int,
    ) -> None:
        self.probe = probe
        self.link = link
        self.sidecar = sidecar
        self.engine_pid = engine_pid
        self._world = world

    async def blocks(self) -> int:
        """KV blocks in use, by the engine's own gauge."""
        return round(await self.probe.kv_usage() * (NUM_BLOCKS - 1))

    async def owned(self) -> list[ledger_pb2.Pin]:
        """Pins that a conversation owns, as the ledger has them."""
        async with rpc.open_channel(self._world.stack.kvmeta_address) as channel:
            stub = ledger_pb2_grpc.LedgerServiceStub(channel)
            worker_id = self.sidecar.worker_id
            listed = await stub.ListPins(
                ledger_pb2.ListPinsRequest(worker_id=worker_id, page_size=1000)
            )
        return list(listed.pins)

    async def let_all_go(self) -> None:
        """End every conversation; what is no one's falls with its lease."""
        for pin in await self.owned():
            key = pin.conversation.key
            await self._world.client.end_conversation(key.conversation_id, model=key.model)
        await self.down_to(0, "nothing is retained", LEASE_SECONDS + 5)

    async def up_to(self, blocks: int, what: str) -> None:
        """Wait until that many blocks are in use."""

        async def holds() -> bool:
            return await self.blocks() >= blocks

        await eventually(holds, what)

    async def down_to(self, blocks: int, what: str, seconds: float = 2.0) -> None:
        """Wait until no more blocks than that are in use."""

        async def holds() -> bool:
            return await self.blocks() <= blocks

        await eventually(holds, what, seconds)


@asynccontextmanager
async def leased_decode(
    world: World, model: Path, worker_id: str = WORKER_ID, engine_args: str = ""
) -> AsyncIterator[LeasedDecode]:
    """Put it in the place of the stack's own decode worker, which is not started again.

    Its KV is read over TCP, as if it were on another host.
    """
    await world.stack.stop("decode-0")
    run_dir = world.stack.run_dir
    async with AsyncExitStack() as stack:
        ports = stack.enter_context(PortPool())
        engine = engine_settings(
            "decode",
            worker_id,
            model,
            run_dir,
            ports,
            served_model_name=MODEL,
            pin_lease_seconds=LEASE_SECONDS,
            decoder_kv_blocks_ttl_seconds=RETENTION_SECONDS,
            engine_args=f"--num-gpu-blocks-override {NUM_BLOCKS} {engine_args}",
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("UCX_TLS", "tcp,self")
            process = await stack.enter_async_context(launch(engine))
        session = await stack.enter_async_context(open_session())
        link = await stack.enter_async_context(EngineLink(engine.engine_port))
        sidecar = AttachedSidecar(
            engine,
            engine_url=link.url,
            kvmeta=world.stack.kvmeta_address,
            log=run_dir / f"{worker_id}.log",
            args=(*PATIENT, "--retention-policy=lru", "--settle-timeout-seconds=5"),
        )
        stack.callback(sidecar.kill)
        await sidecar.start()
        await until_served(world)
        probe = EngineProbe(engine.engine_base_url, session, MODEL)
        yield LeasedDecode(world, probe, link, sidecar, process.pid)


async def until_served(world: World) -> None:
    """Wait until the router knows a prefill and a decode worker of the model."""

    async def served() -> bool:
        return await lists_model(world.client, MODEL, 1, 1)

    await eventually(served, "the router knows both workers", seconds=60)
