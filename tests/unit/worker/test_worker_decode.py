"""The decode leg."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvloop.errors import ConflictError, InternalError, InvalidFieldError, UnavailableError
from services.worker.chunks import Usage
from services.worker.commits import CommitLimits, CommitOutcome, TurnCommitter
from services.worker.decode import DecodeLeg, DecodeOrder, DecodeSummary
from services.worker.decode_body import read_decode_body
from services.worker.engine import DONE, Api
from services.worker.event_hub import EventHub
from services.worker.ledger import Conversation
from services.worker.metrics import WorkerMetrics
from services.worker.tasks import background_tasks
from tests.unit.worker.fake_vllm import chunk, error_body, usage_chunk
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

pytestmark = pytest.mark.asyncio(loop_factories=["leaping"])

CONVERSATION = Conversation("default", "tiny", "c1", turn=3)
BODY = b'{"model":"tiny","messages":[],"stream":true,"stream_options":{"include_usage":true}}'
FIRST, SECOND, LAST, USAGE = chunk("a"), chunk("b"), chunk("", "stop"), usage_chunk(5, 2)


@dataclass
class _World:
    engine: FakeEngine = field(default_factory=FakeEngine)
    ledger: FakeLedger = field(default_factory=FakeLedger)
    link: FakeLink = field(default_factory=FakeLink)
    metrics: WorkerMetrics = field(default_factory=WorkerMetrics)
    clock: FakeClock = field(default_factory=FakeClock)

    def __post_init__(self) -> None:
        self.hub = EventHub(self.clock, self.metrics)
        self.hub.connected(hello(), self.link)
        self.engine.script = [FIRST, SECOND, self.finish, LAST, USAGE, DONE]

    def finish(self, **changes: Any) -> None:
        """The engine's connector reports the end of the turn."""
        self.hub.finished(ENGINE, finished(**changes))

    def outcome(self, name: str) -> float | None:
        return self.metrics.registry.get_sample_value(
            "kvloop_worker_commits_total", {"outcome": name}
        )


@pytest.fixture
def world() -> _World:
    return _World()


@pytest.fixture
async def leg(world: _World) -> AsyncIterator[DecodeLeg]:
    async with background_tasks() as tasks:
        committer = TurnCommitter(
            "decode-0",
            world.ledger,
            world.hub,
            world.clock,
            world.metrics,
            tasks,
            CommitLimits(
                event_timeout_seconds=0.1, commit_timeout_seconds=0.1, settle_timeout_seconds=1
            ),
        )
        yield DecodeLeg(world.engine, world.hub, committer, world.metrics)


def _order(
    body: bytes = BODY,
    params: bytes = b"",
    conversation: Conversation | None = CONVERSATION,
) -> DecodeOrder:
    read = read_decode_body(Api.CHAT_COMPLETIONS, body, whole=False)
    return DecodeOrder("turn-1", Api.CHAT_COMPLETIONS, read, params, conversation)


async def _run(leg: DecodeLeg, order: DecodeOrder) -> tuple[list[bytes], DecodeSummary]:
    *chunks, summary = [event async for event in leg.run(order)]
    assert isinstance(summary, DecodeSummary)
    assert all(isinstance(event, list) for event in chunks)
    passed = [chunk for event in chunks if isinstance(event, list) for chunk in event]
    return [*passed, *summary.chunks], summary


def _chunks_of_end(event: list[bytes] | DecodeSummary) -> list[bytes]:
    assert isinstance(event, DecodeSummary)
    return event.chunks


async def test_chunks_pass_as_written_and_the_summary_ends_the_leg(
    world: _World, leg: DecodeLeg
) -> None:
    chunks, summary = await _run(leg, _order())
    assert chunks == [FIRST, SECOND, LAST, USAGE]
    assert summary.usage == Usage(5, 2)
    assert summary.commit.outcome is CommitOutcome.COMMITTED
    assert (summary.commit.retained_tokens, summary.commit.granted_seconds) == (64, 60.0)
    assert world.outcome("COMMITTED") == 1


async def test_the_chunk_that_ends_the_answer_comes_after_the_commit(
    world: _World, leg: DecodeLeg
) -> None:
    committed = asyncio.Event()
    world.ledger.answers = [committed]
    async with aclosing(leg.run(_order())) as events:
        assert [await anext(events), await anext(events)] == [[FIRST], [SECOND]]
        last = asyncio.ensure_future(anext(events))
        await until(lambda: world.ledger.commits)
        assert not last.done()
        committed.set()
        assert _chunks_of_end(await last)[0] == LAST


async def test_chunks_that_arrive_together_pass_together(world: _World, leg: DecodeLeg) -> None:
    world.engine.script = [[FIRST, SECOND], [SECOND, LAST, USAGE, DONE]]
    committed = asyncio.Event()
    world.ledger.answers = [committed]
    async with aclosing(leg.run(_order())) as events:
        assert await anext(events) == [FIRST, SECOND]
        assert await anext(events) == [SECOND]  # does not wait for the commit
        world.finish()
        last = asyncio.ensure_future(anext(events))
        await until(lambda: world.ledger.commits)
        assert not last.done()
        committed.set()
        assert _chunks_of_end(await last) == [LAST, USAGE]


async def test_what_arrived_with_an_error_passes_before_it(world: _World, leg: DecodeLeg) -> None:
    world.engine.script = [[FIRST, SECOND, error_body("oops", 500), DONE]]
    async with aclosing(leg.run(_order())) as events:
        assert await anext(events) == [FIRST, SECOND]
        with pytest.raises(InternalError, match="oops"):
            await anext(events)


async def test_a_slow_ledger_holds_the_answer_back_for_a_bounded_time(
    world: _World, leg: DecodeLeg
) -> None:
    world.ledger.answers = [asyncio.Event()]
    chunks, summary = await _run(leg, _order())
    assert chunks == [FIRST, SECOND, LAST, USAGE]
    assert summary.commit.outcome is CommitOutcome.LEDGER_UNAVAILABLE


async def test_an_event_after_the_last_chunk_is_waited_for(world: _World, leg: DecodeLeg) -> None:
    world.engine.script = [FIRST, LAST, DONE]
    async with aclosing(leg.run(_order())) as events:
        assert await anext(events) == [FIRST]
        last = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        assert not last.done()
        world.finish()
        assert _chunks_of_end(await last)[0] == LAST


async def test_without_an_event_the_answer_is_whole_and_the_outcome_named(
    world: _World, leg: DecodeLeg
) -> None:
    world.engine.script = [FIRST, LAST, USAGE, DONE]
    chunks, summary = await _run(leg, _order())
    assert chunks == [FIRST, LAST, USAGE]
    assert summary.commit.outcome is CommitOutcome.NO_EVENT


async def test_an_answer_without_finish_reason_is_committed_at_its_end(
    world: _World, leg: DecodeLeg
) -> None:
    world.engine.script = [FIRST, world.finish, DONE]
    _, summary = await _run(leg, _order())
    assert summary.commit.outcome is CommitOutcome.COMMITTED


async def test_a_turn_without_conversation_is_not_held_back_nor_committed(
    world: _World, leg: DecodeLeg
) -> None:
    world.engine.script = [FIRST, LAST, USAGE, DONE]
    chunks, summary = await _run(leg, _order(conversation=None))
    assert chunks == [FIRST, LAST, USAGE]
    assert summary.commit.outcome is CommitOutcome.NOT_REQUESTED
    assert "kv_transfer_params" not in world.engine.bodies[0]
    assert world.ledger.commits == []


async def test_a_turn_pinned_against_our_will_is_released(world: _World, leg: DecodeLeg) -> None:
    _, summary = await _run(leg, _order(params=b'{"a":1}', conversation=None))
    assert summary.commit.outcome is CommitOutcome.NOT_REQUESTED
    assert world.engine.bodies[0]["kv_transfer_params"]["kvloop_retain"] is False
    assert world.link.released == ["req-1"]


async def test_several_choices_retain_nothing(world: _World, leg: DecodeLeg) -> None:
    other = b'{"choices":[{"index":1,"delta":{},"finish_reason":"stop"}]}'
    world.engine.script = [FIRST, LAST, other, USAGE, DONE]
    chunks, summary = await _run(leg, _order(b'{"n":2}'))
    assert chunks == [FIRST, LAST, other, USAGE]
    assert summary.commit.outcome is CommitOutcome.NOT_PINNED
    assert "kv_transfer_params" not in world.engine.bodies[0]


async def test_the_end_of_one_choice_waits_for_no_more_than_the_next_chunk(
    world: _World, leg: DecodeLeg
) -> None:
    more = b'{"choices":[{"index":1,"delta":{"content":"x"}}]}'
    end = b'{"choices":[{"index":1,"delta":{},"finish_reason":"stop"}]}'
    world.engine.script = [LAST, more, asyncio.Event(), end, DONE]
    async with aclosing(leg.run(_order(b'{"n":2}'))) as events:
        assert await anext(events) == [LAST, more]


async def test_the_end_of_an_answer_passes_before_an_error(world: _World, leg: DecodeLeg) -> None:
    world.engine.script = [world.finish, LAST, UnavailableError("cut", reason="ENGINE_LOST")]
    async with aclosing(leg.run(_order())) as events:
        assert await anext(events) == [LAST]
        with pytest.raises(UnavailableError):
            await anext(events)


async def test_several_choices_cannot_share_a_hand_off(world: _World, leg: DecodeLeg) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        await _run(leg, _order(b'{"n":2}', params=b'{"a":1}'))
    assert caught.value.reason == "NOT_SPLITTABLE"
    assert world.engine.bodies == []


async def test_a_usage_chunk_that_the_client_did_not_ask_for_is_kept_back(
    world: _World, leg: DecodeLeg
) -> None:
    chunks, summary = await _run(leg, _order(b'{"stream":true}'))
    assert chunks == [FIRST, SECOND, LAST]
    assert summary.usage == Usage(5, 2)


async def test_transfer_params_never_leave_the_sidecar(world: _World, leg: DecodeLeg) -> None:
    leaky = LAST[:-1] + b',"kv_transfer_params":{"remote_host":"10.0.0.1"}}'
    world.engine.script = [FIRST, world.finish, leaky, DONE]
    chunks, _ = await _run(leg, _order())
    assert chunks == [FIRST, LAST]


async def test_a_superseded_turn_is_released_and_named(world: _World, leg: DecodeLeg) -> None:
    world.ledger.answers = [ConflictError("newer", reason="TURN_SUPERSEDED")]
    chunks, summary = await _run(leg, _order())
    assert chunks == [FIRST, SECOND, LAST, USAGE]
    assert summary.commit.outcome is CommitOutcome.SUPERSEDED
    assert world.link.released == ["req-1"]


async def test_an_error_in_the_stream_ends_the_leg_with_it(world: _World, leg: DecodeLeg) -> None:
    world.engine.script = [FIRST, error_body("oops", 500), DONE]
    async with aclosing(leg.run(_order())) as events:
        assert await anext(events) == [FIRST]
        with pytest.raises(InternalError, match="oops"):
            await anext(events)
    assert world.ledger.commits == []


async def test_an_engine_that_breaks_off_after_the_event_gets_its_turn_released(
    world: _World, leg: DecodeLeg
) -> None:
    world.engine.script = [FIRST, world.finish, UnavailableError("cut", reason="ENGINE_LOST")]
    with pytest.raises(UnavailableError):
        await _run(leg, _order())
    assert world.link.released == ["req-1"]
    assert world.ledger.commits == []


async def test_closing_the_leg_aborts_the_request_and_stores_nothing(
    world: _World, leg: DecodeLeg
) -> None:
    world.engine.script = [FIRST, asyncio.Event()]
    async with aclosing(leg.run(_order())) as events:
        assert await anext(events) == [FIRST]
    assert world.engine.aborted == 1
    world.finish(retained=False)  # as the engine reports an aborted turn
    assert world.ledger.commits == []
    assert world.link.released == []


async def test_a_cancelled_turn_that_had_ended_in_the_engine_is_released(
    world: _World, leg: DecodeLeg
) -> None:
    world.engine.script = [FIRST, asyncio.Event()]
    async with aclosing(leg.run(_order())) as events:
        assert await anext(events) == [FIRST]
    world.finish()
    assert world.link.released == ["req-1"]
    assert world.ledger.commits == []


async def test_a_turn_id_can_be_used_again_once_its_leg_has_ended(
    world: _World, leg: DecodeLeg
) -> None:
    world.engine.script = [UnavailableError("cut", reason="ENGINE_LOST")]
    with pytest.raises(UnavailableError):
        await _run(leg, _order())
    world.engine.script = [FIRST, world.finish, LAST, DONE]
    _, summary = await _run(leg, _order())
    assert summary.commit.outcome is CommitOutcome.COMMITTED
