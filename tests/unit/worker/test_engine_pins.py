"""The engine's book of pins: a deadline counts as moved only when that is certain."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.worker.engine_pins import RENEWAL_MARGIN_SECONDS, EnginePins

LEASE = 60.0
TTL = 480.0
IN_FLIGHT = 2


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pins(clock: Clock) -> EnginePins:
    return EnginePins(clock, steps_in_flight=IN_FLIGHT, longest_lease_seconds=TTL)


def _retain(pins: EnginePins, clock: Clock, request_id: str = "r") -> None:
    pins.retain(request_id, "turn", num_tokens=100, num_blocks=4, deadline=clock.now + LEASE)


def _confirmed(pins: EnginePins, steps: int) -> list[dict[str, Any]]:
    return [pin for _ in range(steps) for pin in pins.begin_step()]


def test_snapshot_tells_all_of_a_pin(pins: EnginePins, clock: Clock) -> None:
    _retain(pins, clock)
    clock.now += 10
    assert len(pins) == 1
    assert pins.snapshot() == [
        {
            "request_id": "r",
            "turn_id": "turn",
            "num_tokens": 100,
            "num_blocks": 4,
            "remaining_seconds": 50.0,
            "extension_seconds": 0.0,
            "age_seconds": 10.0,
        }
    ]


def test_renewal_is_confirmed_after_all_steps_that_began_before(
    pins: EnginePins, clock: Clock
) -> None:
    _retain(pins, clock)
    pins.begin_step()
    clock.now += 40
    assert pins.renew([("r", LEASE)]) == {"r": clock.now + LEASE}
    assert pins.begin_step() == []
    assert pins.snapshot()[0]["remaining_seconds"] == 20.0
    clock.now += 1
    confirmed = {"request_id": "r", "remaining_seconds": 59.0, "extension_seconds": 40.0}
    assert pins.begin_step() == [confirmed]
    assert pins.snapshot()[0]["remaining_seconds"] == 59.0
    assert _confirmed(pins, 5) == []


def test_pin_dropped_before_the_confirmation_is_not_confirmed(
    pins: EnginePins, clock: Clock
) -> None:
    _retain(pins, clock)
    pins.begin_step()
    pins.renew([("r", LEASE)])
    pins.begin_step()
    assert pins.freed(["r", "other"]) == ["r"]
    assert _confirmed(pins, 5) == []
    assert pins.renew([("r", LEASE)]) == {}
    assert pins.freed(["r"]) == []


@pytest.mark.parametrize("left", [RENEWAL_MARGIN_SECONDS - 0.01, 0.0, -1.0])
def test_deadline_that_is_almost_there_is_not_moved(
    pins: EnginePins, clock: Clock, left: float
) -> None:
    _retain(pins, clock)
    clock.now += LEASE - left
    assert pins.renew([("r", LEASE)]) == {}


def test_unconfirmed_renewal_does_not_count_as_the_deadline_of_the_next(
    pins: EnginePins, clock: Clock
) -> None:
    _retain(pins, clock)
    pins.begin_step()
    assert pins.renew([("r", LEASE)])
    clock.now += LEASE - 1
    assert pins.renew([("r", LEASE)]) == {}


def test_deadline_never_comes_nearer(pins: EnginePins, clock: Clock) -> None:
    _retain(pins, clock)
    pins.begin_step()
    assert pins.renew([("r", 5.0)]) == {"r": clock.now + LEASE}
    assert _confirmed(pins, IN_FLIGHT)[0]["remaining_seconds"] == LEASE
    assert pins.renew([("r", -5.0)]) == {"r": clock.now + LEASE}


@pytest.mark.parametrize("seconds", [1e9, float("inf")])
def test_renewal_reaches_no_further_than_the_engines_ttl(
    pins: EnginePins, clock: Clock, seconds: float
) -> None:
    _retain(pins, clock)
    assert pins.renew([("r", seconds)]) == {"r": clock.now + TTL}


def test_no_number_leaves_the_deadline_alone(pins: EnginePins, clock: Clock) -> None:
    _retain(pins, clock)
    assert pins.renew([("r", float("nan"))]) == {"r": clock.now + LEASE}


def test_renewals_of_consecutive_steps_are_confirmed_one_by_one(
    pins: EnginePins, clock: Clock
) -> None:
    _retain(pins, clock)
    remaining = []
    for _ in range(6):
        remaining += [pin["extension_seconds"] for pin in pins.begin_step()]
        clock.now += 1
        pins.renew([("r", LEASE)])
    assert remaining == [1.0, 2.0, 3.0, 4.0]


def test_release_names_pins_only_and_is_final(pins: EnginePins, clock: Clock) -> None:
    _retain(pins, clock)
    pins.begin_step()
    pins.renew([("r", LEASE)])
    assert pins.release(["r", "running"]) == ["r"]
    assert pins.renew([("r", LEASE)]) == {}
    assert _confirmed(pins, 5) == []
    assert pins.release(["r"]) == ["r"], "doing it again does no harm"
    assert pins.freed(["r"]) == ["r"]
    assert pins.release(["r"]) == []


class Pipeline(RuleBasedStateMachine):
    """Pins against a worker that executes steps late and drops what is due.

    Whatever happens, it never drops blocks before a deadline that the book calls
    certain, unless it was told to release them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.pins = EnginePins(self.clock, steps_in_flight=IN_FLIGHT, longest_lease_seconds=TTL)
        self.in_flight: list[dict[str, float]] = []
        self.retained: set[str] = set()
        """What the worker holds."""
        self.deadlines: dict[str, float] = {}
        """The worker's own table."""
        self.ended: dict[str, float] = {}
        """Turns that ended since the last step was scheduled, with their deadlines."""
        self.certain: dict[str, float] = {}
        self.released: set[str] = set()

    @rule(seconds=st.floats(0, 70))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def turn_ends(self) -> None:
        request_id = f"r{len(self.certain)}"
        _retain(self.pins, self.clock, request_id)
        self.retained.add(request_id)
        self.ended[request_id] = self.certain[request_id] = self.clock.now + LEASE

    @precondition(lambda self: len(self.in_flight) < IN_FLIGHT)
    @rule(seconds=st.floats(0, 100), release=st.booleans(), number=st.integers(0, 9))
    def step_is_scheduled(self, seconds: float, release: bool, number: int) -> None:
        for pin in self.pins.begin_step():
            assert pin["request_id"] in self.retained, "dropped and confirmed"
            self.certain[pin["request_id"]] = self.clock.now + pin["remaining_seconds"]
        told, self.ended = self.ended, {}
        if release:
            gone = self.pins.release([f"r{number}"])
            self.released.update(gone)
            told |= dict.fromkeys(gone, self.clock.now)
        else:
            told |= self.pins.renew([(f"r{number}", seconds), (f"r{number + 1}", seconds)])
        self.in_flight.append(told)

    @precondition(lambda self: self.in_flight)
    @rule()
    def step_is_executed(self) -> None:
        told = self.in_flight.pop(0)
        self.deadlines |= {name: told[name] for name in told if name in self.retained}
        due = [name for name, deadline in self.deadlines.items() if deadline <= self.clock.now]
        for request_id in due:
            del self.deadlines[request_id]
            self.retained.remove(request_id)
            early = self.certain[request_id] - self.clock.now > 1e-6
            assert not early or request_id in self.released, "dropped before a certain deadline"
        assert sorted(self.pins.freed(due)) == sorted(due)

    @invariant()
    def book_holds_what_the_worker_holds(self) -> None:
        pins = self.pins.snapshot()
        assert {pin["request_id"] for pin in pins} == self.retained
        assert all(pin["remaining_seconds"] <= TTL + 1e-6 for pin in pins)
        assert all(pin["extension_seconds"] >= 0 for pin in pins)


Pipeline.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPipeline = Pipeline.TestCase
