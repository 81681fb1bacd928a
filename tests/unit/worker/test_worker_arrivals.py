"""Which steps wait for transfers that are under way, and how long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from services.worker.engine_arrivals import LONGEST_SECONDS, LOOK_SECONDS, Arrivals, QuietSteps


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
        worker = SimpleNamespace(
            _recving_transfers=transfers,
            nixl_wrapper=SimpleNamespace(check_xfer_state=self.state_of),
        )
        return self.time(self.arrivals(worker))

    def arrivals(self, worker: Any) -> Arrivals:
        """Of a worker half, by this clock."""
        return Arrivals(worker, clock=lambda: self.now, sleep=self._sleep)

    def time(self, arrivals: Arrivals) -> float:
        """Wait, and return the seconds that it took."""
        began = self.now
        arrivals.wait()
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


class _BrokenWorker:
    """One read under way, of which NIXL or vLLM tells something else first.

    Args:
        error: what the first look raises.
    """

    def __init__(self, error: Exception) -> None:
        self._recving_transfers = {"request": ["handle"]}
        self.nixl_wrapper = self
        self.looks = 0
        self._error = error

    def check_xfer_state(self, handle: str) -> str:
        self.looks += 1
        if self.looks == 1:
            raise self._error
        return "PROC"


def test_a_read_that_nixl_reports_as_broken_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    """And the next is waited for as ever: peers come and go."""
    lost = type("nixlRemoteDisconnectError", (Exception,), {"__module__": "nixl_cu12._bindings"})
    world = _World({})
    arrivals = world.arrivals(_BrokenWorker(lost()))
    assert world.time(arrivals) == 0
    assert world.time(arrivals) >= LONGEST_SECONDS
    assert not caplog.messages


def test_after_an_error_that_nobody_foresaw_there_is_no_wait_and_it_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world, worker = _World({}), _BrokenWorker(AttributeError("no '_handle'"))
    arrivals = world.arrivals(worker)
    for _ in range(3):
        assert world.time(arrivals) == 0
    assert worker.looks == 1
    (record,) = caplog.records
    assert "do not wait for reads any more" in record.message
    assert record.exc_info
    assert "no '_handle'" in str(record.exc_info[1])


_TELLS_STATES = SimpleNamespace(check_xfer_state=str)


@pytest.mark.parametrize(
    "worker",
    [
        SimpleNamespace(nixl_wrapper=SimpleNamespace(check_xfer_state=print)),
        SimpleNamespace(
            _recving_transfers=[], nixl_wrapper=SimpleNamespace(check_xfer_state=print)
        ),
        SimpleNamespace(_recving_transfers={}, nixl_wrapper=object()),
        SimpleNamespace(_recving_transfers={}),
    ],
    ids=["no reads", "reads of another kind", "no state", "no wrapper"],
)
def test_a_vllm_that_keeps_its_reads_elsewhere_is_told_of_at_its_start(
    worker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    arrivals = _World({}).arrivals(worker)
    (said,) = caplog.messages
    assert "keeps its reads elsewhere" in said
    arrivals.wait()
    assert len(caplog.messages) == 1


def test_an_engine_that_has_computed_nothing_yet_is_quiet() -> None:
    assert QuietSteps(3, lockstep=False).schedule(0)


@pytest.mark.parametrize(
    ("in_flight", "quiet"),
    [
        (1, [False, True, True, True]),
        (2, [False, False, True, True]),
        (3, [False, False, False, True]),
    ],
    ids=["one by one", "asynchronous", "two stages"],
)
def test_a_step_is_quiet_if_nothing_is_computed_in_it_or_beside_it(
    in_flight: int, quiet: list[bool]
) -> None:
    """So many steps after one that computes may be under way with it."""
    steps = QuietSteps(in_flight, lockstep=False)
    for _ in range(2):
        assert [steps.schedule(tokens) for tokens in (7, 0, 0, 0)] == quiet


def test_no_step_is_quiet_where_other_engines_wait_for_it() -> None:
    steps = QuietSteps(2, lockstep=True)
    assert not any(steps.schedule(0) for _ in range(5))
