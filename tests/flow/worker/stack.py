"""A whole sidecar between real sockets: gRPC, HTTP, the event socket, kvmeta."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from grpc import aio

from kvloop import rpc
from kvloop.common.v1 import common_pb2
from kvloop.worker.v1 import worker_pb2, worker_pb2_grpc
from services.worker import app
from services.worker.settings import WorkerSettings
from services.worker.tasks import background_tasks
from tests.unit.worker.fake_events_client import FakeEventsClient, connect
from tests.unit.worker.fake_kvmeta import FakeKvmeta, fake_kvmeta
from tests.unit.worker.fake_vllm import Answer, FakeVllm, chunk, fake_vllm, sse, usage_chunk
from tests.unit.worker.fakes import ENGINE, until

CHAT = "/v1/chat/completions"
BODY = b'{"model":"tiny","messages":[{"role":"user","content":"hi"}],"max_tokens":9}'
KEY = common_pb2.ConversationKey(tenant="default", model="tiny", conversation_id="c1")
ENGINE_REF = common_pb2.EngineRef(engine_id=ENGINE.engine_id, epoch=ENGINE.epoch)


@dataclass
class SidecarStack:
    """One sidecar and everything that it talks to."""

    vllm: FakeVllm
    kvmeta: FakeKvmeta
    connector: FakeEventsClient
    worker: app.Worker
    stub: worker_pb2_grpc.WorkerServiceAsyncStub
    channel: aio.Channel

    def metric(self, name: str, **labels: str) -> float | None:
        """A counter of the sidecar."""
        return self.worker.metrics.registry.get_sample_value(f"kvloop_worker_{name}", labels)


SILENT_ENGINE: Any = {"event_timeout_seconds": 0.3}
"""Settings for turns whose end the engine does not report."""


def settings(tmp_path: Path, role: str = "decode", **changes: Any) -> WorkerSettings:
    """Settings of a sidecar that attaches; patient, as the machine may be busy."""
    values: dict[str, Any] = {
        "role": role,
        "worker_id": f"{role}-0",
        "listen": "127.0.0.1:0",
        "kvmeta": "127.0.0.1:1",
        "engine_url": "http://127.0.0.1:1",
        "events_socket": tmp_path / "e.sock",
        "engine_connect_timeout_seconds": 15,
        "event_timeout_seconds": 15,
        "commit_timeout_seconds": 15,
        "engine_start_timeout_seconds": 20,
        "hello_timeout_seconds": 20,
        "grace_seconds": 2,
    }
    return WorkerSettings(**(values | changes))


@asynccontextmanager
async def sidecar(
    tmp_path: Path, role: str = "decode", **changes: Any
) -> AsyncIterator[SidecarStack]:
    """Run a sidecar of that role until it is registered."""
    async with AsyncExitStack() as stack:
        vllm = await stack.enter_async_context(fake_vllm())
        kvmeta = await stack.enter_async_context(fake_kvmeta())
        found = {"engine_url": vllm.url, "kvmeta": kvmeta.address}
        chosen = settings(tmp_path, role, **(found | changes))
        connector = await stack.enter_async_context(connector_of(chosen))
        worker = await stack.enter_async_context(app.build(chosen))
        await until(lambda: worker.registration.registered)
        channel = await stack.enter_async_context(rpc.open_channel(f"127.0.0.1:{worker.port}"))
        stub: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(channel)
        yield SidecarStack(vllm, kvmeta, await connector, worker, stub, channel)


@asynccontextmanager
async def connector_of(
    chosen: WorkerSettings,
) -> AsyncIterator[asyncio.Future[FakeEventsClient]]:
    """Connect as the connector does: once the sidecar's socket is there."""
    connected: asyncio.Future[FakeEventsClient] = asyncio.get_running_loop().create_future()
    kv_role = "kv_producer" if chosen.role == "prefill" else "kv_consumer"

    async def run() -> None:
        await until(chosen.events_socket.exists)
        async with connect(chosen.events_socket, kv_role=kv_role) as client:
            connected.set_result(client)
            await asyncio.Event().wait()

    async with background_tasks() as tasks:
        tasks.start(run(), name="connector")
        yield connected


def prefill_request(**changes: Any) -> worker_pb2.PrefillRequest:
    """A prefill leg."""
    fields: dict[str, Any] = {
        "turn_id": "turn-1",
        "api": common_pb2.API_CHAT_COMPLETIONS,
        "body_json": BODY,
    }
    return worker_pb2.PrefillRequest(**(fields | changes))


def decode_request(**changes: Any) -> worker_pb2.DecodeRequest:
    """A decode leg of a conversation."""
    fields: dict[str, Any] = {
        "turn_id": "turn-1",
        "api": common_pb2.API_CHAT_COMPLETIONS,
        "body_json": BODY,
        "commit": worker_pb2.TurnRef(key=KEY, turn=3),
    }
    return worker_pb2.DecodeRequest(**(fields | changes))


FIRST, LAST, USAGE = chunk("你好"), chunk("", "stop"), usage_chunk(5, 2)


def answer(*before_the_end: object) -> Answer:
    """A streamed answer; what is given comes before the chunk that ends it."""
    return Answer(steps=[*sse(FIRST, done=False), *before_the_end, *sse(LAST, USAGE)])


DecodeCall = aio.UnaryStreamCall[worker_pb2.DecodeRequest, worker_pb2.DecodeResponse]


async def next_event(call: DecodeCall) -> worker_pb2.DecodeResponse | None:
    """The next event of a decode leg; None at its end."""
    event = await call.read()
    return event if isinstance(event, worker_pb2.DecodeResponse) else None


async def next_chunk(call: DecodeCall) -> bytes:
    """The next chunk of a decode leg."""
    event = await next_event(call)
    assert event is not None
    assert event.WhichOneof("event") == "chunk_json"
    return event.chunk_json


async def collect(call: DecodeCall) -> tuple[list[bytes], worker_pb2.DecodeSummary]:
    """The chunks that are left, and the summary."""
    events = []
    while (event := await next_event(call)) is not None:
        events.append(event)
    *chunks, last = events
    assert last.WhichOneof("event") == "summary"
    return [event.chunk_json for event in chunks], last.summary


def prefill_reply(params: dict[str, Any] | None) -> Answer:
    """What a prefill engine answers."""
    return Answer(
        body=msgspec.json.encode(
            {"choices": [], "usage": {"prompt_tokens": 9}, "kv_transfer_params": params}
        )
    )
