"""Stand-ins for what a sidecar talks to, each under the contract of its port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from kvloop.errors import UnavailableError
from kvloop.kvmeta.v1 import registry_pb2
from services.worker.engine import DONE, Api, EngineGauges, EngineModel, TokenCount
from services.worker.event_messages import EngineRef, Finished, Hello
from services.worker.ledger import Commit
from services.worker.registry import Lease

ENGINE = EngineRef("engine-1", "epoch-1")

Step = bytes | list[bytes] | asyncio.Event | Exception | Callable[[], object]
"""Of a scripted stream: an event's data, that of several at once, something to wait
for, an error to raise, or something to do."""


class FakeClock:
    """Time that passes only when someone sleeps or a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


class FakeEngine:
    """An engine whose replies are scripted. Keeps what it was sent."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.raw_bodies: list[bytes] = []
        self.replies: list[bytes | Exception] = []
        self.script: Sequence[Step] = [DONE]
        self.served = [EngineModel("tiny", 4096)]
        self.load = EngineGauges(1, 2, 0.25)
        self.is_healthy: Callable[[], bool] = lambda: True
        self.aborted = 0
        self.begun: list[FakeBegunRequest] = []
        self.answers = asyncio.Event()
        """Replies to requests in two parts begin when this is set."""
        self.answers.set()

    async def complete(self, api: Api, body: bytes) -> bytes:
        self.keep(body)
        return self.next_reply()

    def next_reply(self) -> bytes:
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply

    @asynccontextmanager
    async def stream(self, api: Api, body: bytes) -> AsyncIterator[AsyncIterator[Sequence[bytes]]]:
        self.keep(body)
        async with self.scripted() as events:
            yield events

    def begin(self, api: Api, head: bytes, headers: Mapping[str, str]) -> FakeBegunRequest:
        begun = FakeBegunRequest(self, head, headers)
        self.begun.append(begun)
        return begun

    @property
    def connections(self) -> int:
        """Requests in two parts that have a connection."""
        return sum(begun.connected for begun in self.begun)

    @asynccontextmanager
    async def scripted(self) -> AsyncIterator[AsyncIterator[Sequence[bytes]]]:
        ended = False

        async def events() -> AsyncIterator[Sequence[bytes]]:
            nonlocal ended
            for step in self.script:
                if isinstance(step, bytes | list):
                    together = [step] if isinstance(step, bytes) else step
                    yield together
                    ended = ended or DONE in together
                elif isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, Exception):
                    raise step
                else:
                    step()
            if not ended:
                raise UnavailableError("the stream ended early", reason="ENGINE_LOST")

        try:
            yield events()
        finally:
            self.aborted += not ended

    async def models(self) -> Sequence[EngineModel]:
        return self.served

    async def tokenize(self, body: bytes) -> TokenCount:
        self.keep(body)
        return TokenCount(7, 4096)

    async def gauges(self) -> EngineGauges:
        return self.load

    async def healthy(self) -> bool:
        return self.is_healthy()

    def keep(self, body: bytes) -> None:
        self.raw_bodies.append(body)
        self.bodies.append(msgspec.json.decode(body))


class FakeBegunRequest:
    """A request in two parts to a FakeEngine, which keeps it once it is whole."""

    def __init__(self, engine: FakeEngine, head: bytes, headers: Mapping[str, str]) -> None:
        self._engine = engine
        self.head = head
        self.headers = headers
        self.connected = False
        self._closed = False
        self._rest: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._whole = False
        self._replies = False
        self._ended = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None

    def break_off(self) -> None:
        """The engine closes the connection."""
        self._rest.put_nowait(None)

    async def run(self) -> None:
        if not self._closed:
            async with asyncio.TaskGroup() as group:
                self._serving = group.create_task(self._serve())

    async def _serve(self) -> None:
        self.connected = True
        try:
            rest = await self._rest.get()
            if rest is not None:
                self._whole = True
                self._engine.keep(self.head + rest)
                await self._engine.answers.wait()
                self._replies = True
        finally:
            self.connected = self._replies
            self._engine.aborted += self._whole and not self._replies
            self._ended.set()

    async def finish(self, rest: bytes) -> bool:
        if self._ended.is_set():
            return False
        self._rest.put_nowait(rest)
        try:
            await self._ended.wait()
        except asyncio.CancelledError:
            self.close()
            raise
        if self._whole and not self._replies:
            raise UnavailableError("the engine is gone", reason="ENGINE_LOST")
        return self._replies

    @asynccontextmanager
    async def stream(self) -> AsyncIterator[AsyncIterator[Sequence[bytes]]]:
        try:
            async with self._engine.scripted() as events:
                yield events
        finally:
            self.connected = False

    async def complete(self) -> bytes:
        self.connected = False
        return self._engine.next_reply()

    def close(self) -> None:
        self._closed = True
        self.connected = False
        if self._serving is not None:
            self._serving.cancel()
        self._ended.set()


class FakeLedger:
    """A ledger whose answers are scripted; grants 60 s when the script is empty."""

    def __init__(self) -> None:
        self.commits: list[Commit] = []
        self.stored: list[Commit] = []
        self.answers: list[float | Exception | asyncio.Event] = []

    async def commit(self, commit: Commit, *, timeout_seconds: float) -> float:
        self.commits.append(commit)
        answer = self.answers.pop(0) if self.answers else 60.0
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, asyncio.Event):
            await answer.wait()
            answer = 60.0
        self.stored.append(commit)
        return answer


class FakeRegistry:
    """A registry that grants what it is told to, and can be out of reach."""

    def __init__(self) -> None:
        self.registered: list[registry_pb2.Worker] = []
        self.renewals: list[tuple[str, bool]] = []
        self.ended: list[str] = []
        self.granted = 30.0
        self.renewed = 30.0
        self.failures: list[Exception] = []

    async def register(self, worker: registry_pb2.Worker, *, ttl_seconds: float) -> Lease:
        self._fail()
        kept = registry_pb2.Worker()
        kept.CopyFrom(worker)
        self.registered.append(kept)
        return Lease(f"lease-{len(self.registered)}", self.granted)

    async def renew(self, lease_id: str, *, draining: bool) -> float:
        self._fail()
        self.renewals.append((lease_id, draining))
        return self.renewed

    async def deregister(self, lease_id: str) -> None:
        self._fail()
        self.ended.append(lease_id)

    def _fail(self) -> None:
        if self.failures:
            raise self.failures.pop(0)


class FakeLink:
    """A connector's connection that keeps what it was told."""

    def __init__(self) -> None:
        self.released: list[str] = []
        self.renewed: list[tuple[str, float]] = []

    def send_release(self, request_ids: Sequence[str]) -> None:
        self.released += request_ids

    def send_renew(self, leases: Sequence[tuple[str, float]]) -> None:
        self.renewed += leases


def hello(**changes: Any) -> Hello:
    """What a decode engine's connector says first."""
    return msgspec.structs.replace(
        Hello(
            engine_id=ENGINE.engine_id,
            epoch=ENGINE.epoch,
            contract_version=1,
            kv_role="kv_consumer",
            vllm_version="0.32.0",
            nixl_version="1.5.1",
            block_size=32,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            data_parallel_rank=0,
            kv_connector="KvloopConnector",
            kv_buffer_device="cpu",
            side_channel_host="127.0.0.1",
            side_channel_port=5700,
            max_model_len=4096,
            num_kv_blocks=500,
            bidirectional_kv_xfer=True,
            decoder_kv_blocks_ttl=480.0,
            kv_recompute_threshold=64,
            hybrid_kv_cache=False,
            lease_renewal=True,
            kv_cache_dtype="auto",
            pin_lease_seconds=60.0,
            kv_block_bytes=65536,
        ),
        **changes,
    )


PARAMS = b'{"remote_request_id":"req-1", "remote_block_ids":[[1,2]], "x":1.0, "n":null}'
"""A decode engine's handle, with spacing that re-encoding would lose."""


def finished(turn_id: str = "turn-1", *, retained: bool = True, **changes: Any) -> Finished:
    """The event of a finished turn."""
    event = Finished(
        turn_id=turn_id,
        retained=retained,
        num_tokens=64 if retained else 0,
        num_blocks=2 if retained else 0,
        ttl_seconds=480.0,
        params=msgspec.Raw(PARAMS if retained else b"null"),
    )
    return msgspec.structs.replace(event, **changes)


async def until(
    condition: Callable[[], object] | Callable[[], Awaitable[object]], seconds: float = 20.0
) -> None:
    """Wait until the condition holds; fail after that many seconds."""
    async with asyncio.timeout(seconds):
        while True:
            found = condition()
            if isinstance(found, Awaitable):
                found = await found
            if found:
                return
            await asyncio.sleep(0.005)
