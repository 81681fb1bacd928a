"""kvmeta and both sidecars in one process that costs next to nothing: for the router alone.

    python -m bench.relay.fake_services

Prints its port. The ledger knows no conversation, the registry knows a worker for each
leg, and both are this server, each on a port of its own. Answers are bytes that were made
before it started; a request says how it is answered, in the text of its body.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import uvloop

from bench.relay import replies
from kvloop import rpc
from kvloop.common.v1 import common_pb2
from kvloop.kvmeta.v1 import ledger_pb2, registry_pb2
from kvloop.worker.v1 import worker_pb2

_EVENTS_AT_ONCE = 64
_TAKEN = ledger_pb2.TakeHandleResponse(
    turn=1, miss_reason=common_pb2.MISS_REASON_FIRST_TURN
).SerializeToString()
_PREFILLED = worker_pb2.PrefillResponse(
    transfer_params_json=replies.HANDED_OVER,
    report=common_pb2.PrefillReport(prompt_tokens=200, recomputed_tokens=200),
).SerializeToString()
_SUMMARY = worker_pb2.DecodeSummary(
    usage=common_pb2.Usage(prompt_tokens=200, completion_tokens=16),
    commit_outcome=worker_pb2.COMMIT_OUTCOME_COMMITTED,
    retained_tokens=216,
)


def _chunks(count: int) -> bytes:
    batch = worker_pb2.ChunkBatch(chunks_json=[replies.CHUNK_JSON] * count)
    return worker_pb2.DecodeResponse(batch=batch).SerializeToString()


_CHUNK = worker_pb2.DecodeResponse(chunk_json=replies.CHUNK_JSON).SerializeToString()
_MANY = _chunks(_EVENTS_AT_ONCE)
_END = worker_pb2.DecodeResponse(
    batch=worker_pb2.ChunkBatch(chunks_json=replies.END_JSON, summary=_SUMMARY)
).SerializeToString()


async def _take(request: bytes, context: Any) -> bytes:
    return _TAKEN


async def _prefill(request: bytes, context: Any) -> bytes:
    return _PREFILLED


async def _decode(request: bytes, context: Any) -> AsyncIterator[bytes]:
    left = replies.number_of(request, b'"max_tokens":', 16)
    gap = replies.number_of(request, b'"gap_us":', 0) / 1e6
    burst = replies.number_of(request, b'"burst":', _EVENTS_AT_ONCE)
    while left:
        if gap or burst == 1:
            left -= 1
            yield _CHUNK
            await asyncio.sleep(gap)
            continue
        some = min(left, burst)
        left -= some
        yield _MANY if some == _EVENTS_AT_ONCE else _chunks(some)
    yield _END


def _worker(role: str, address: str) -> registry_pb2.Worker:
    return registry_pb2.Worker(
        worker_id=f"{role}-0",
        role=common_pb2.WorkerRole.Value(f"WORKER_ROLE_{role.upper()}"),
        address=address,
        model=replies.MODEL,
        engine=common_pb2.EngineRef(engine_id=f"engine-{role}", epoch="1"),
        traits=registry_pb2.EngineTraits(
            contract_version=2,
            block_size=16,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            kv_buffer_device="cuda",
            kv_cache_dtype="auto",
            bidirectional_kv_xfer=True,
            max_model_len=1_000_000,
        ),
        state=registry_pb2.Worker.STATE_ACTIVE,
    )


async def _serve() -> None:
    server = grpc.aio.server(options=[*rpc.OPTIONS, ("grpc.so_reuseport", 0)])
    port = server.add_insecure_port("127.0.0.1:0")
    workers = [
        _worker(role, f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        for role in ("prefill", "decode")
    ]
    change = registry_pb2.WatchWorkersResponse

    async def watch(request: bytes, context: Any) -> AsyncIterator[bytes]:
        for worker in workers:
            yield change(type=change.TYPE_ADDED, worker=worker, revision=1).SerializeToString()
        yield change(type=change.TYPE_SYNCED, revision=1).SerializeToString()
        await asyncio.Event().wait()

    unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
    services: dict[str, dict[str, Any]] = {
        "kvmeta.v1.LedgerService": {"TakeHandle": unary(_take)},
        "kvmeta.v1.RegistryService": {"WatchWorkers": stream(watch)},
        "worker.v1.WorkerService": {"Prefill": unary(_prefill), "Decode": stream(_decode)},
    }
    for name, methods in services.items():
        handlers = grpc.method_handlers_generic_handler(f"kvloop.{name}", methods)
        server.add_generic_rpc_handlers((handlers,))
    await server.start()
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(_serve())
