"""What the calls to a worker tell its breaker, and who sees it."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from kvloop.errors import DeadlineError, InternalError, InvalidFieldError, UnavailableError
from services.router.breaker import BreakerState
from services.router.policy import TurnFacts
from tests.flow.router.fakes import make_worker
from tests.flow.router.stack import DECODE, PREFILL
from tests.unit.router.pool_harness import Harness, harness

FAILED = InternalError("", reason="ENGINE_FAILED")


def is_reachable(h: Harness) -> bool:
    found = h.pool.find("a")
    assert found is not None
    return found.reachable


async def test_a_worker_that_cannot_be_reached_is_avoided_until_its_cooldown_is_over() -> None:
    async with harness() as h:
        await h.pool.put(make_worker("a", PREFILL))
        h.fail("a")
        assert not h.pool.candidates("tiny", PREFILL).usable
        assert h.openings == 1
        h.now += 5
        assert h.pool.candidates("tiny", PREFILL).usable
        assert h.pool.breakers(BreakerState.HALF_OPEN) == 1


async def test_one_turn_at_a_time_tries_a_worker_again() -> None:
    async with harness() as h:
        await h.pool.put(make_worker("a", PREFILL))
        h.fail("a")
        h.now += 5
        with h.pool.use("a"):
            assert not h.pool.candidates("tiny", PREFILL).usable
            with h.pool.use("a"):  # as a last resort: no second probe, no verdict on the first
                pass
        assert h.pool.breakers(BreakerState.CLOSED) == 1


async def test_a_probe_that_fails_doubles_the_cooldown() -> None:
    async with harness() as h:
        await h.pool.put(make_worker("a", PREFILL))
        h.fail("a")
        h.now += 5
        h.fail("a")
        h.now += 9
        assert h.pool.breakers(BreakerState.OPEN) == 1
        h.now += 1
        assert h.pool.breakers(BreakerState.HALF_OPEN) == 1


async def test_a_probe_whose_caller_hangs_up_lets_the_next_turn_try() -> None:
    async with harness() as h:
        await h.pool.put(make_worker("a", PREFILL))
        h.fail("a")
        h.now += 5
        with pytest.raises(asyncio.CancelledError), h.pool.use("a"):
            raise asyncio.CancelledError
        assert h.pool.candidates("tiny", PREFILL).usable


async def test_failures_of_a_worker_that_can_be_reached_add_up() -> None:
    async with harness() as h:
        await h.pool.put(make_worker("a", PREFILL))
        failure = InternalError("", reason="ENGINE_FAILED")
        h.fail("a", failure)
        h.fail("a", failure)
        with h.pool.use("a"):
            pass
        h.fail("a", failure)
        h.fail("a", failure)
        assert h.pool.candidates("tiny", PREFILL).usable
        h.fail("a", failure)
        assert not h.pool.candidates("tiny", PREFILL).usable


@pytest.mark.parametrize(
    "error", [InvalidFieldError("", reason="ENGINE_REJECTED"), DeadlineError("late")]
)
async def test_what_is_not_the_workers_fault_opens_no_breaker(error) -> None:
    async with harness() as h:
        await h.pool.put(make_worker("a", PREFILL))
        for _ in range(10):
            h.fail("a", error)
        assert h.pool.breakers(BreakerState.CLOSED) == 1


async def test_a_decode_worker_is_well_again_at_the_first_chunk() -> None:
    async with harness() as h:
        await h.pool.put(make_worker("a", DECODE))
        h.fail("a")
        h.now += 5
        facts = TurnFacts()
        with h.pool.use("a", facts):
            h.pool.first_chunk("a", facts)
            assert h.pool.candidates("tiny", DECODE).usable


async def test_a_late_failure_of_an_earlier_life_says_nothing_of_the_new_one() -> None:
    async with harness() as h:
        await h.pool.put(make_worker("a", PREFILL))

        async def outlive() -> None:
            with h.pool.use("a"):
                await h.pool.put(make_worker("a", PREFILL, epoch="2"))
                h.fail("a")
                raise FAILED

        with pytest.raises(InternalError):
            await outlive()
        assert not is_reachable(h)
        h.now += 5
        assert is_reachable(h)


async def test_failures_of_turns_that_had_no_choice_do_not_prolong_it() -> None:
    async with harness() as h:
        await h.pool.put(make_worker("a", DECODE))
        for _ in range(4):
            h.fail("a")
        assert h.openings == 1
        h.now += 5
        assert is_reachable(h)


async def test_calls_that_are_no_legs_do_not_close_it_nor_take_the_place_of_the_probe() -> None:
    async with harness() as h:
        await h.pool.put(make_worker("a", DECODE))
        h.fail("a")
        h.now += 5
        with h.pool.use("a", is_leg=False):
            assert is_reachable(h)
        assert h.pool.breakers(BreakerState.HALF_OPEN) == 1


async def test_calls_that_are_no_legs_do_not_end_a_row_of_failures() -> None:
    async with harness() as h:
        await h.pool.put(make_worker("a", DECODE))
        for _ in range(3):
            h.fail("a", FAILED)
            with h.pool.use("a", is_leg=False):
                pass
        assert not is_reachable(h)


async def test_of_calls_that_are_no_legs_only_those_count_that_do_not_reach_the_worker() -> None:
    async with harness() as h:
        await h.pool.put(make_worker("a", DECODE))
        for _ in range(3):
            with pytest.raises(InternalError), h.pool.use("a", is_leg=False):
                raise FAILED
        assert is_reachable(h)
        unreachable = UnavailableError("", reason="WORKER_UNREACHABLE")
        with pytest.raises(UnavailableError), h.pool.use("a", is_leg=False):
            raise unreachable
        assert not is_reachable(h)


async def test_a_decode_worker_that_fails_every_answer_is_avoided() -> None:
    async with harness() as h:
        await h.pool.put(make_worker("a", DECODE))
        for _ in range(3):
            fail_mid_answer(h)
        assert not is_reachable(h)
        h.now += 5
        fail_mid_answer(h)  # and stays so: the first chunk of a probe forgets nothing
        assert not is_reachable(h)
        h.now += 9
        assert not is_reachable(h)
        assert h.openings == 2


async def test_an_answer_that_ends_well_forgets_earlier_failures() -> None:
    async with harness() as h:
        await h.pool.put(make_worker("a", DECODE))
        for _ in range(3):
            fail_mid_answer(h)
        h.now += 5
        facts = TurnFacts()
        with h.pool.use("a", facts):
            h.pool.first_chunk("a", facts)
        for _ in range(2):
            fail_mid_answer(h)
        assert is_reachable(h)


async def test_counting_breakers_changes_nothing_because_another_thread_does_it() -> None:
    async with harness() as h:
        await h.pool.put(make_worker("a", PREFILL))
        await h.pool.put(make_worker("b", PREFILL))
        h.fail("a")
        seen = h.pool.candidates("tiny", PREFILL)[0]
        h.pool.keep_only(set())
        h.now += 60
        with capture_logs() as logged:
            assert await asyncio.to_thread(h.pool.breakers, BreakerState.HALF_OPEN) == 1
        assert logged == []
        assert seen.breaker is BreakerState.OPEN


async def test_a_worker_that_drains_is_well_but_takes_no_turns() -> None:
    async with harness() as h:
        await h.pool.put(make_worker("a", DECODE))
        assert len(h.pool.models()[0].decode) == 1
        assert h.pool.candidates("tiny", DECODE).usable
        with capture_logs() as logged:
            h.fail("a", UnavailableError("", reason="DRAINING"))
        assert logged == []
        assert is_reachable(h)
        assert not h.pool.candidates("tiny", DECODE).usable
        assert h.pool.models()[0].decode == []


def fail_mid_answer(h: Harness) -> None:
    def leg() -> None:
        facts = TurnFacts()
        with h.pool.use("a", facts):
            h.pool.first_chunk("a", facts)
            raise FAILED

    with pytest.raises(InternalError):
        leg()
