"""Preparations of decode legs, and what they need around them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from services.worker.admission import Admission
from services.worker.commits import CommitLimits, TurnCommitter
from services.worker.decode import DecodeLeg, DecodeOrder, DecodeSummary
from services.worker.decode_body import read_decode_body
from services.worker.engine import DONE, Api
from services.worker.event_hub import EventHub
from services.worker.ledger import Conversation
from services.worker.metrics import WorkerMetrics
from services.worker.preparations import Preparations
from services.worker.tasks import BackgroundTasks
from tests.unit.worker.fake_vllm import chunk, usage_chunk
from tests.unit.worker.fakes import (
    ENGINE,
    FakeClock,
    FakeEngine,
    FakeLedger,
    FakeLink,
    finished,
    hello,
    until,
)

CONVERSATION = Conversation("default", "tiny", "c1", turn=3)
PARAMS = b'{"remote_port":1}'
FIRST, LAST, USAGE = chunk("a"), chunk("", "stop"), usage_chunk(5, 2)
LIMIT = 2


def decode_order(turn_id: str = "turn-1", raw: bytes = b'{"messages":[]}') -> DecodeOrder:
    """A leg's order without its params."""
    body = read_decode_body(Api.CHAT_COMPLETIONS, raw, whole=False)
    return DecodeOrder(turn_id, Api.CHAT_COMPLETIONS, body, b"", CONVERSATION)


@dataclass
class World:
    """Preparations, and a decode leg on an engine that is a fake."""

    tasks: BackgroundTasks
    engine: FakeEngine = field(default_factory=FakeEngine)
    metrics: WorkerMetrics = field(default_factory=WorkerMetrics)

    def __post_init__(self) -> None:
        clock = FakeClock()
        self.hub = EventHub(clock, self.metrics)
        self.hub.connected(hello(), FakeLink())
        self.engine.script = [FIRST, self.finish, LAST, USAGE, DONE]
        self.admission = Admission(self.metrics)
        limits = CommitLimits(
            event_timeout_seconds=0.1, commit_timeout_seconds=30, settle_timeout_seconds=1
        )
        committer = TurnCommitter(
            "decode-0", FakeLedger(), self.hub, clock, self.metrics, self.tasks, limits
        )
        self.leg = DecodeLeg(self.engine, self.hub, committer, self.metrics)
        self.preparations = Preparations[DecodeOrder](
            self.engine, self.admission, self.metrics, self.tasks, limit=LIMIT
        )

    def finish(self) -> None:
        """The engine reports the turn's end."""
        self.hub.finished(ENGINE, finished())

    async def hold(self, turn_id: str = "turn-1") -> None:
        """Bring a leg's body."""
        await self.preparations.hold(turn_id, partial(decode_order, turn_id), {"a": "b"})

    async def decode(self, turn_id: str = "turn-1") -> list[bytes]:
        """Run a leg that was prepared."""
        chunks: list[bytes] = []
        async with self.preparations.claim(turn_id) as (order, begun):
            order = replace(order, params=PARAMS, begun=begun)
            async for event in self.leg.run(order):
                chunks += event.chunks if isinstance(event, DecodeSummary) else event
        return chunks

    @asynccontextmanager
    async def prepared(self, turn_id: str = "turn-1") -> AsyncIterator[asyncio.Task[None]]:
        """A call that has brought a body; the engine has it."""
        before = len(self.engine.begun)
        async with asyncio.TaskGroup() as group:
            call = group.create_task(self.hold(turn_id))
            await until(lambda: [begun.connected for begun in self.engine.begun[before:]] == [True])
            yield call
            call.cancel()

    def outcome(self, name: str) -> float:
        """How many preparations ended so."""
        found = self.metrics.registry.get_sample_value(
            "kvloop_worker_preparations_total", {"outcome": name}
        )
        return found or 0.0

    async def at_rest(self) -> None:
        """Fails unless nothing is left of any leg."""
        await until(lambda: self.engine.connections == 0)
        assert len(self.preparations) == 0
        with self.hub.watch("turn-1"):
            pass  # or it is running
        await until(lambda: not names_of_tasks() & {"prepare-turn-1", "prepare-turn-2"})


def names_of_tasks() -> set[str]:
    """All that the loop has."""
    return {task.get_name() for task in asyncio.all_tasks()}
