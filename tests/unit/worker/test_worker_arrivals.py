"""How long an empty step waits for transfers that are under way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from services.worker.engine_arrivals import LONGEST_SECONDS, LOOK_SECONDS, await_arrival


class _World:
    """A set clock, and transfers that end by it.

    Args:
        ends: seconds at which each handle's transfer ends, and how.
    """

    def __init__(self, ends: Mapping[str, tuple[float, str]]) -> None:
        self.now = 50.0
        self.looks = 0
        self._ends = {handle: (self.now + after, how) for handle, (after, how) in ends.items()}

    def state_of(self, handle: str) -> str:
        self.looks += 1
        end, how = self._ends[handle]
        return how if self.now >= end else "PROC"

    def wait(self, transfers: Mapping[str, Sequence[str]]) -> float:
        """Wait, and return the seconds that it took."""
        began = self.now
        await_arrival(transfers, self.state_of, clock=lambda: self.now, sleep=self._sleep)
        return self.now - began

    def _sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


_SOON, _LATE = LONGEST_SECONDS / 2, LONGEST_SECONDS * 10


def test_without_transfers_there_is_no_wait() -> None:
    world = _World({})
    assert world.wait({}) == 0
    assert world.looks == 0


@pytest.mark.parametrize("how", ["DONE", "ERR"])
def test_a_wait_is_over_as_soon_as_the_transfer_is(how: str) -> None:
    """A failure is an end, too: vLLM has to hear of it."""
    world = _World({"a": (_SOON, how)})
    assert _SOON <= world.wait({"request": ["a"]}) <= _SOON + LOOK_SECONDS


def test_what_has_ended_before_is_not_waited_for() -> None:
    world = _World({"a": (0, "DONE")})
    assert world.wait({"request": ["a"]}) == 0


def test_a_request_without_handles_has_nothing_to_wait_for() -> None:
    """As vLLM has it where all of a prompt was here already."""
    world = _World({"a": (_LATE, "DONE")})
    assert world.wait({"whole": [], "other": ["a"]}) == 0


def test_one_request_that_has_arrived_is_enough() -> None:
    world = _World({"a": (_LATE, "DONE"), "b": (_SOON, "DONE"), "c": (0, "DONE")})
    took = world.wait({"late": ["a"], "soon": ["b", "c"]})
    assert _SOON <= took <= _SOON + LOOK_SECONDS


def test_a_request_arrives_with_its_last_transfer() -> None:
    world = _World({"a": (0, "DONE"), "b": (_LATE, "DONE")})
    assert world.wait({"request": ["a", "b"]}) >= LONGEST_SECONDS


def test_no_wait_is_longer_than_that() -> None:
    world = _World({"a": (_LATE, "DONE")})
    took = world.wait({"request": ["a"]})
    assert LONGEST_SECONDS <= took <= LONGEST_SECONDS + LOOK_SECONDS


def test_a_state_that_cannot_be_told_is_the_callers_affair() -> None:
    world = _World({})
    with pytest.raises(KeyError):
        world.wait({"request": ["unknown"]})
