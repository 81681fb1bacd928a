"""A finished turn's handle is stored, or its blocks are freed, or neither is safe."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field

import pytest

from kvloop.errors import (
    ConflictError,
    DeadlineError,
    InternalError,
    LimitError,
    PreconditionError,
    UnavailableError,
)
from services.worker.commits import CommitLimits, CommitOutcome, CommitResult, TurnCommitter
from services.worker.event_hub import EventHub
from services.worker.ledger import Conversation
from services.worker.metrics import WorkerMetrics
from services.worker.tasks import background_tasks
from tests.unit.worker.fakes import (
    ENGINE,
    PARAMS,
    FakeClock,
    FakeLedger,
    FakeLink,
    finished,
    hello,
    until,
)

pytestmark = pytest.mark.asyncio(loop_factories=["leaping"])

CONVERSATION = Conversation("default", "tiny", "c1", turn=3)
UNREACHED = UnavailableError("down", reason="LEDGER_UNREACHABLE", reached="false")
LOST = UnavailableError("connection reset")


@dataclass
class _World:
    clock: FakeClock = field(default_factory=FakeClock)
    ledger: FakeLedger = field(default_factory=FakeLedger)
    link: FakeLink = field(default_factory=FakeLink)
    metrics: WorkerMetrics = field(default_factory=WorkerMetrics)

    def __post_init__(self) -> None:
        self.hub = EventHub(self.clock, self.metrics)
        self.hub.connected(hello(), self.link)

    async def run(
        self,
        committer: TurnCommitter,
        *,
        turn_id: str = "turn-1",
        event: bool = True,
        **changes,
    ) -> CommitResult:
        with self.hub.watch(turn_id) as watch:
            if event:
                self.hub.finished(ENGINE, finished(turn_id, **changes))
            return await committer.commit(watch, CONVERSATION)

    def unsettled(self) -> float | None:
        return self.metrics.registry.get_sample_value("kvloop_worker_commits_unsettled_total")


async def _seconds(work: Awaitable[object]) -> float:
    """How long something takes."""
    clock = asyncio.get_running_loop().time
    start = clock()
    await work
    return clock() - start


PATIENT = CommitLimits(
    event_timeout_seconds=5, commit_timeout_seconds=0.5, settle_timeout_seconds=30
)


@pytest.fixture
def world() -> _World:
    return _World()


@pytest.fixture
async def committer(world: _World) -> AsyncIterator[TurnCommitter]:
    async with background_tasks() as tasks:
        yield TurnCommitter(
            "decode-0",
            world.ledger,
            world.hub,
            world.clock,
            world.metrics,
            tasks,
            CommitLimits(
                event_timeout_seconds=0.05,
                commit_timeout_seconds=0.1,
                settle_timeout_seconds=30,
            ),
        )


async def test_the_handle_goes_to_the_ledger_as_the_engine_wrote_it(
    world: _World, committer: TurnCommitter
) -> None:
    assert await world.run(committer) == CommitResult(CommitOutcome.COMMITTED, 64, 60.0)
    (commit,) = world.ledger.commits
    assert commit.params == PARAMS
    assert commit.conversation == CONVERSATION
    assert (commit.turn_id, commit.worker_id, commit.engine) == ("turn-1", "decode-0", ENGINE)
    assert (commit.num_tokens, commit.num_blocks) == (64, 2)
    assert world.link.released == []


async def test_the_ttl_given_is_what_is_left_since_the_event(
    world: _World, committer: TurnCommitter
) -> None:
    with world.hub.watch("turn-1") as watch:
        world.hub.finished(ENGINE, finished(ttl_seconds=480.0))
        world.clock.now += 7.5
        await committer.commit(watch, CONVERSATION)
    assert world.ledger.commits[0].engine_ttl_seconds == 472.5


async def test_the_ledger_is_told_how_long_renewals_can_keep_the_blocks(
    world: _World, committer: TurnCommitter
) -> None:
    with world.hub.watch("turn-1") as watch:
        world.hub.finished(ENGINE, finished(ttl_seconds=60.0))
        world.clock.now += 7.5
        await committer.commit(watch, CONVERSATION)
    (commit,) = world.ledger.commits
    assert (commit.engine_ttl_seconds, commit.retention_ttl_seconds) == (52.5, 472.5)


async def test_a_pin_is_in_hand_exactly_while_its_commit_is_under_way(
    world: _World, committer: TurnCommitter
) -> None:
    held = asyncio.Event()
    world.ledger.answers = [held]
    with world.hub.watch("turn-1") as watch:
        world.hub.finished(ENGINE, finished())
        result = await committer.commit(watch, CONVERSATION)
    assert result.outcome is CommitOutcome.LEDGER_UNAVAILABLE  # so far
    (pin,) = world.hub.pins
    assert pin.in_hand
    held.set()
    await until(lambda: not pin.in_hand)
    assert (pin.tenant, pin.releasing) == ("default", False)


async def test_a_handle_whose_time_is_up_is_not_committed(
    world: _World, committer: TurnCommitter
) -> None:
    with world.hub.watch("turn-1") as watch:
        world.hub.finished(ENGINE, finished(ttl_seconds=5.0))
        world.clock.now += 5.0
        result = await committer.commit(watch, CONVERSATION)
    assert result.outcome is CommitOutcome.LEDGER_UNAVAILABLE
    assert world.ledger.commits == []


async def test_a_turn_that_retained_nothing_is_not_committed(
    world: _World, committer: TurnCommitter
) -> None:
    result = await world.run(committer, retained=False)
    assert result.outcome is CommitOutcome.NOT_PINNED
    assert world.ledger.commits == []


async def test_without_an_event_the_turn_is_released_when_it_comes(
    world: _World, committer: TurnCommitter
) -> None:
    result = await world.run(committer, event=False)
    assert result.outcome is CommitOutcome.NO_EVENT
    world.hub.finished(ENGINE, finished())
    assert world.link.released == ["req-1"]
    assert world.ledger.commits == []


async def test_a_turn_that_lost_against_a_newer_one_is_released(
    world: _World, committer: TurnCommitter
) -> None:
    world.ledger.answers = [ConflictError("newer", reason="TURN_SUPERSEDED")]
    assert (await world.run(committer)).outcome is CommitOutcome.SUPERSEDED
    assert world.link.released == ["req-1"]


@pytest.mark.parametrize(
    "refusal",
    [PreconditionError("gone", reason="ENGINE_GONE"), LimitError("too many conversations")],
)
async def test_a_refused_turn_is_released(
    world: _World, committer: TurnCommitter, refusal: Exception
) -> None:
    world.ledger.answers = [refusal]
    assert (await world.run(committer)).outcome is CommitOutcome.LEDGER_UNAVAILABLE
    assert world.link.released == ["req-1"]


async def test_a_turn_that_surely_never_reached_the_ledger_is_released_at_once(
    world: _World, committer: TurnCommitter
) -> None:
    world.ledger.answers = [UNREACHED]
    assert (await world.run(committer)).outcome is CommitOutcome.LEDGER_UNAVAILABLE
    assert world.link.released == ["req-1"]
    assert len(world.ledger.commits) == 1


@pytest.mark.parametrize("failure", [LOST, DeadlineError("late"), InternalError("bug")])
async def test_a_commit_whose_reply_was_lost_is_repeated_with_the_same_id(
    world: _World, committer: TurnCommitter, failure: Exception
) -> None:
    world.ledger.answers = [failure, UNREACHED, 60.0]
    assert (await world.run(committer)).outcome is CommitOutcome.COMMITTED
    assert {commit.turn_id for commit in world.ledger.commits} == {"turn-1"}
    assert len(world.ledger.commits) == 3
    assert world.link.released == []


async def test_a_repeated_commit_gives_the_ttl_that_is_left_by_then(
    world: _World, committer: TurnCommitter
) -> None:
    world.ledger.answers = [LOST]
    await world.run(committer)
    first, second = world.ledger.commits
    waited = sum(world.clock.slept)
    assert waited > 0
    assert second.engine_ttl_seconds == pytest.approx(first.engine_ttl_seconds - waited)


async def test_a_commit_whose_fate_stays_unknown_keeps_its_blocks(
    world: _World, committer: TurnCommitter
) -> None:
    world.ledger.answers = [LOST] * 200
    result = await world.run(committer)
    assert result.outcome is CommitOutcome.LEDGER_UNAVAILABLE
    await until(lambda: world.unsettled() == 1)
    assert world.link.released == []
    assert sum(world.clock.slept) >= 30


async def test_a_lost_commit_that_turns_out_superseded_is_released(
    world: _World, committer: TurnCommitter
) -> None:
    world.ledger.answers = [LOST, ConflictError("newer", reason="TURN_SUPERSEDED")]
    assert (await world.run(committer)).outcome is CommitOutcome.SUPERSEDED
    assert world.link.released == ["req-1"]


async def test_the_answer_does_not_wait_for_a_slow_ledger_but_the_commit_goes_on(
    world: _World, committer: TurnCommitter
) -> None:
    slow = asyncio.Event()
    world.ledger.answers = [slow]
    assert (await world.run(committer)).outcome is CommitOutcome.LEDGER_UNAVAILABLE
    assert world.link.released == []
    slow.set()
    await until(lambda: world.ledger.stored)
    assert len(world.ledger.commits) == 1


async def test_answers_do_not_wait_for_a_ledger_that_is_silent_until_it_speaks_again(
    world: _World,
) -> None:
    async with background_tasks() as tasks:
        committer = TurnCommitter(
            "decode-0", world.ledger, world.hub, world.clock, world.metrics, tasks, PATIENT
        )
        answers = [asyncio.Event() for _ in range(3)]
        world.ledger.answers = [answers[0], answers[1], 60.0, answers[2]]
        assert await _seconds(world.run(committer)) == pytest.approx(0.5)
        assert await _seconds(world.run(committer)) < 0.1
        assert await world.run(committer) == CommitResult(CommitOutcome.COMMITTED, 64, 60.0)
        assert await _seconds(world.run(committer)) == pytest.approx(0.5)  # it had answered
        for answer in answers:
            answer.set()
        await until(lambda: len(world.ledger.stored) == 4)


async def test_an_answer_that_did_not_wait_says_nothing_of_a_ledger_that_spoke_meanwhile(
    world: _World,
) -> None:
    async with background_tasks() as tasks, asyncio.TaskGroup() as group:
        committer = TurnCommitter(
            "decode-0", world.ledger, world.hub, world.clock, world.metrics, tasks, PATIENT
        )
        answers = [asyncio.Event() for _ in range(3)]
        world.ledger.answers = [answers[0], answers[1], 60.0, answers[2]]
        await world.run(committer)  # now the ledger is known to be silent
        hurried = group.create_task(world.run(committer, turn_id="turn-2"))
        await until(lambda: len(world.ledger.commits) == 2)
        spoken = await world.run(committer, turn_id="turn-3")
        assert spoken.outcome is CommitOutcome.COMMITTED
        assert (await hurried).outcome is CommitOutcome.LEDGER_UNAVAILABLE
        assert await _seconds(world.run(committer, turn_id="turn-4")) == pytest.approx(0.5)
        for answer in answers:
            answer.set()


async def test_an_event_that_comes_as_patience_ends_counts(
    world: _World, committer: TurnCommitter
) -> None:
    """As after a moment in which the process did not run: both are there at once then."""
    asyncio.get_running_loop().call_later(0.05, world.hub.finished, ENGINE, finished())
    assert (await world.run(committer, event=False)).outcome is CommitOutcome.COMMITTED


async def test_an_answer_that_comes_as_patience_ends_counts(
    world: _World, committer: TurnCommitter
) -> None:
    for _ in range(2):  # and the ledger is not taken to be silent
        answer = asyncio.Event()
        world.ledger.answers = [answer]
        asyncio.get_running_loop().call_later(0.1, answer.set)
        assert (await world.run(committer)).outcome is CommitOutcome.COMMITTED


async def test_a_caller_who_leaves_before_the_event_gets_the_turn_released(
    world: _World, committer: TurnCommitter
) -> None:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(world.run(committer, event=False))
        await asyncio.sleep(0)
        task.cancel()
    world.hub.finished(ENGINE, finished())
    assert world.link.released == ["req-1"]
    assert world.ledger.commits == []


async def test_a_caller_who_leaves_during_the_commit_does_not_interrupt_it(
    world: _World, committer: TurnCommitter
) -> None:
    stored = asyncio.Event()
    world.ledger.answers = [stored]
    async with asyncio.TaskGroup() as group:
        task = group.create_task(world.run(committer))
        await until(lambda: world.ledger.commits)
        task.cancel()
    stored.set()
    await until(lambda: world.ledger.stored)
    assert world.link.released == []


async def test_a_defect_in_the_ledger_client_costs_the_handle_only(
    world: _World, committer: TurnCommitter
) -> None:
    world.ledger.answers = [ValueError("defect")]
    assert (await world.run(committer)).outcome is CommitOutcome.LEDGER_UNAVAILABLE
    assert world.unsettled() == 1
    assert (await world.run(committer)).outcome is CommitOutcome.COMMITTED
