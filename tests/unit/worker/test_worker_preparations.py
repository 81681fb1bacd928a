"""Bodies of decode legs that come before their params."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import product

import pytest

from kvloop.errors import (
    KvloopError,
    LimitError,
    PreconditionError,
    UnavailableError,
)
from services.worker.admission import Admission
from services.worker.commits import CommitLimits, TurnCommitter
from services.worker.decode import DecodeLeg, DecodeOrder, DecodeSummary
from services.worker.decode_body import read_decode_body
from services.worker.engine import DONE, Api
from services.worker.event_hub import EventHub
from services.worker.ledger import Conversation
from services.worker.metrics import WorkerMetrics
from services.worker.preparations import Preparations
from services.worker.tasks import BackgroundTasks, background_tasks
from tests.unit.worker.awaits import CancelledAt
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


def _order(turn_id: str = "turn-1", raw: bytes = b'{"messages":[]}') -> DecodeOrder:
    body = read_decode_body(Api.CHAT_COMPLETIONS, raw, whole=False)
    return DecodeOrder(turn_id, Api.CHAT_COMPLETIONS, body, b"", CONVERSATION)


@dataclass
class _World:
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
            event_timeout_seconds=0.1, commit_timeout_seconds=1, settle_timeout_seconds=1
        )
        committer = TurnCommitter(
            "decode-0", FakeLedger(), self.hub, clock, self.metrics, self.tasks, limits
        )
        self.leg = DecodeLeg(self.engine, self.hub, committer, self.metrics)
        self.preparations = Preparations[DecodeOrder](
            self.engine, self.hub.watches, self.admission, self.metrics, self.tasks, limit=LIMIT
        )

    def finish(self) -> None:
        self.hub.finished(ENGINE, finished())

    async def decode(self, turn_id: str = "turn-1") -> list[bytes]:
        """Run a leg that was prepared."""
        chunks: list[bytes] = []
        with self.preparations.claim(turn_id) as (order, begun):
            order = replace(order, params=PARAMS, begun=begun)
            async for event in self.leg.run(order):
                chunks += event.chunks if isinstance(event, DecodeSummary) else event
        return chunks

    @asynccontextmanager
    async def prepared(self, turn_id: str = "turn-1") -> AsyncIterator[asyncio.Task[None]]:
        """A call that has brought a body; the engine has it."""
        before = len(self.engine.begun)
        async with asyncio.TaskGroup() as group:
            call = group.create_task(self.preparations.hold(_order(turn_id), {"a": "b"}))
            await until(lambda: [begun.connected for begun in self.engine.begun[before:]] == [True])
            yield call
            call.cancel()

    def outcome(self, name: str) -> float:
        found = self.metrics.registry.get_sample_value(
            "kvloop_worker_preparations_total", {"outcome": name}
        )
        return found or 0.0

    async def at_rest(self) -> None:
        """Fails unless nothing is left of any leg."""
        await until(lambda: self.engine.connections == 0)
        assert len(self.preparations) == 0
        assert not self.hub.watches("turn-1")
        await until(lambda: not _names_of_tasks() & {"prepare-turn-1", "prepare-turn-2"})


def _names_of_tasks() -> set[str]:
    return {task.get_name() for task in asyncio.all_tasks()}


@pytest.fixture
async def world() -> AsyncIterator[_World]:
    async with background_tasks() as tasks:
        yield _World(tasks)


async def test_a_prepared_leg_is_answered_as_any_other(world: _World) -> None:
    async with world.prepared() as call:
        assert await world.decode() == [FIRST, LAST, USAGE]
        await call
    assert world.engine.bodies == [
        {
            "messages": [],
            "stream": True,
            "stream_options": {"include_usage": True},
            "kv_transfer_params": {"kvloop_turn_id": "turn-1", "remote_port": 1},
        }
    ]
    assert world.engine.begun[0].headers == {"a": "b"}
    assert world.outcome("used") == 1
    await world.at_rest()


async def test_the_call_that_brought_the_body_ends_once_the_leg_has_it(world: _World) -> None:
    world.engine.answers.clear()
    async with world.prepared() as call, asyncio.TaskGroup() as group:
        leg = group.create_task(world.decode())
        await call  # though the engine has not answered yet
        world.engine.answers.set()
        assert await leg == [FIRST, LAST, USAGE]
    await world.at_rest()


async def test_a_leg_outlives_the_call_that_brought_its_body(world: _World) -> None:
    async with world.prepared() as call:
        with world.preparations.claim("turn-1") as (order, begun):
            order = replace(order, params=PARAMS, begun=begun)
            call.cancel()  # before it could answer
            await asyncio.wait([call])
            events = [event async for event in world.leg.run(order)]
    assert isinstance(events[-1], DecodeSummary)
    await world.at_rest()


async def test_a_call_that_ends_first_gives_the_body_up(world: _World) -> None:
    async with world.prepared() as call:
        call.cancel()
        await asyncio.wait([call])
        with pytest.raises(PreconditionError) as caught:
            await world.decode()
    assert caught.value.reason == "NOT_PREPARED"
    assert world.outcome("given_up") == 1
    await world.at_rest()


async def test_a_leg_that_nobody_prepared_is_turned_away_untouched(world: _World) -> None:
    with pytest.raises(PreconditionError) as caught:
        await world.decode()
    assert caught.value.reason == "NOT_PREPARED"
    assert world.engine.bodies == []
    await world.at_rest()


async def test_a_leg_is_claimed_once(world: _World) -> None:
    world.engine.answers.clear()
    async with world.prepared(), asyncio.TaskGroup() as group:
        leg = group.create_task(world.decode())
        await until(lambda: world.engine.bodies)
        with pytest.raises(PreconditionError, match="turn-1"):
            await world.decode()
        world.engine.answers.set()
        assert await leg
    await world.at_rest()


async def test_a_body_that_the_engine_has_no_more_is_sent_anew(world: _World) -> None:
    async with world.prepared():
        world.engine.begun[0].break_off()
        await until(lambda: world.engine.connections == 0)
        assert await world.decode() == [FIRST, LAST, USAGE]
    assert len(world.engine.bodies) == 1
    assert world.engine.bodies[0]["kv_transfer_params"]["remote_port"] == 1
    assert (world.outcome("resent"), world.outcome("used")) == (1, 0)
    await world.at_rest()


async def test_a_whole_reply_comes_for_both_parts_and_anew(world: _World) -> None:
    reply = b'{"choices":[{"index":0,"finish_reason":"stop"}]}'
    for broken in (False, True):
        world.engine.replies = [reply]
        raw = b'{"messages":[]}'
        body = read_decode_body(Api.CHAT_COMPLETIONS, raw, whole=True)
        order = replace(_order(), body=body, whole=True, conversation=None)
        async with asyncio.TaskGroup() as group:
            group.create_task(world.preparations.hold(order, {}))
            await until(lambda: world.engine.begun and world.engine.begun[-1].connected)
            if broken:
                world.engine.begun[-1].break_off()
                await until(lambda: world.engine.connections == 0)
            assert await world.decode() == [reply]
        await world.at_rest()
    assert [body.keys() for body in world.engine.bodies] == [{"messages", "kv_transfer_params"}] * 2


async def test_a_turn_is_prepared_once(world: _World) -> None:
    async with world.prepared():
        with pytest.raises(PreconditionError) as caught:
            await world.preparations.hold(_order(), {})
        assert caught.value.reason == "TURN_RUNNING"
        assert await world.decode()  # with the body that came first
    await world.at_rest()


async def test_a_turn_that_runs_is_not_prepared(world: _World) -> None:
    with world.hub.watch("turn-1"), pytest.raises(PreconditionError) as caught:
        await world.preparations.hold(_order(), {})
    assert caught.value.reason == "TURN_RUNNING"
    assert world.engine.begun == []


async def test_a_body_that_comes_in_another_way_takes_the_place_of_the_one_that_waits(
    world: _World,
) -> None:
    with pytest.RaisesGroup(PreconditionError):
        async with world.prepared():
            world.preparations.discard("turn-1")
            world.preparations.discard("turn-1")
            await world.at_rest()
    assert world.outcome("given_up") == 1


async def test_so_many_wait_and_no_more(world: _World) -> None:
    async with world.prepared("turn-1"), world.prepared("turn-2"):
        with pytest.raises(LimitError) as caught:
            await world.preparations.hold(_order("turn-3"), {})
        assert caught.value.reason == "TOO_MANY_PREPARED"
        assert await world.decode("turn-2")
        async with world.prepared("turn-3"):
            assert len(world.preparations) == LIMIT
    await world.at_rest()


async def test_a_worker_that_drains_prepares_nothing_and_gives_up_what_waits(
    world: _World,
) -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(UnavailableError, check=_is_draining)):
        async with world.prepared():
            world.admission.drain()
            world.preparations.drain()
            await world.at_rest()
    with pytest.raises(UnavailableError) as caught:
        await world.preparations.hold(_order(), {})
    assert _is_draining(caught.value)


def _is_draining(error: KvloopError) -> bool:
    return error.reason == "DRAINING"


async def test_a_leg_that_fails_before_it_asks_closes_its_request(world: _World) -> None:
    async with world.prepared():
        with world.hub.watch("turn-1"), pytest.raises(PreconditionError):
            await world.decode()
    assert world.engine.bodies == []
    await world.at_rest()


async def test_a_request_whose_task_never_ran_keeps_no_leg_waiting(world: _World) -> None:
    """All tasks are cancelled when the engine has ended, also those that have not begun."""
    async with asyncio.TaskGroup() as group:
        group.create_task(world.preparations.hold(_order(), {}))
        await asyncio.sleep(0)
        world.tasks.cancel()
        assert FIRST in await world.decode()
    assert world.outcome("resent") == 1
    assert not world.engine.begun[0].connected


async def test_both_calls_may_be_cancelled_at_any_await(world: _World) -> None:
    reached = 0
    for which, number in product(("hold", "decode"), range(12)):
        gate = asyncio.Event()
        world.engine.script = [FIRST, gate, LAST, DONE]
        hold = CancelledAt(world.preparations.hold(_order(), {}), number if which == "hold" else -1)
        decode = CancelledAt(_decode_if_prepared(world), number if which == "decode" else -1)
        async with asyncio.TaskGroup() as group:
            group.create_task(hold.run())
            await asyncio.sleep(0)
            group.create_task(decode.run())
            for _ in range(20):
                await asyncio.sleep(0)
            gate.set()
        await world.at_rest()
        reached += hold.reached + decode.reached
    assert reached >= 4


async def test_both_calls_may_end_at_every_step_of_the_loop(world: _World) -> None:
    for ends, after in product(("hold", "decode", "both"), range(25)):
        world.engine.script = [FIRST, asyncio.Event()]
        async with asyncio.TaskGroup() as group:
            hold = group.create_task(world.preparations.hold(_order(), {}))
            await asyncio.sleep(0)
            decode = group.create_task(_decode_if_prepared(world))
            for _ in range(after):
                await asyncio.sleep(0)
            if ends != "decode":
                hold.cancel()
            if ends != "hold":
                decode.cancel()
            await asyncio.sleep(0)
            hold.cancel()
            decode.cancel()
        await world.at_rest()


async def _decode_if_prepared(world: _World) -> None:
    with suppress(PreconditionError):  # NOT_PREPARED, if the body was given up
        await world.decode()
