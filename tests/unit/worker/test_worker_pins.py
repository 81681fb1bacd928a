"""The sidecar's mirror of the engine's pins agrees with it, and learns from it."""

from __future__ import annotations

from typing import Any

import pytest

from services.worker.event_messages import EngineRef, RenewedPin, RetainedPin
from services.worker.gaps import PauseHistory
from services.worker.metrics import WorkerMetrics
from services.worker.pins import Pin, PinTable, ReleaseCause, Standing
from tests.unit.worker.fakes import ENGINE


class _Pauses(PauseHistory):
    """Remembers what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, str, float]] = []

    def returned(self, tenant: str, seconds: float) -> None:
        self.told.append(("returned", tenant, seconds))

    def cut_short(self, tenant: str, seconds: float) -> None:
        self.told.append(("cut short", tenant, seconds))


@pytest.fixture
def metrics() -> WorkerMetrics:
    return WorkerMetrics()


@pytest.fixture
def pauses() -> _Pauses:
    return _Pauses()


@pytest.fixture
def table(pauses: _Pauses, metrics: WorkerMetrics) -> PinTable:
    table = PinTable(pauses, metrics)
    table.connected(ENGINE, 0.0)
    return table


def _pin(name: str, *, blocks: int = 10, ended: float = 0.0, **changes) -> Pin:
    return Pin(f"req-{name}", name, blocks * 32, blocks, ended, ended + 60.0, **changes)


def _held(name: str, **changes) -> RetainedPin:
    fields: dict[str, Any] = {
        "request_id": f"req-{name}",
        "turn_id": name,
        "num_tokens": 320,
        "num_blocks": 10,
        "remaining_seconds": 40.0,
        "extension_seconds": 120.0,
        "age_seconds": 140.0,
    }
    return RetainedPin(**(fields | changes))


def _sample(metrics: WorkerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"kvloop_worker_{name}", labels)


def test_pins_and_their_blocks_are_shown_for_as_long_as_they_last(
    table: PinTable, metrics: WorkerMetrics
) -> None:
    table.add(_pin("a", blocks=10), 100.0)
    table.add(_pin("b", blocks=5), 102.0)
    assert _sample(metrics, "retained_pins") == 2
    assert _sample(metrics, "retained_blocks") == 15
    table.freed(["req-a", "req-unknown"], 110.0)
    assert _sample(metrics, "retained_pins") == 1
    assert _sample(metrics, "retained_blocks") == 5
    assert _sample(metrics, "retained_block_seconds_total") == 10 * 2 + 15 * 8


def test_a_pin_that_was_read_is_a_conversation_that_returned(
    table: PinTable, pauses: _Pauses
) -> None:
    table.add(_pin("a", ended=100.0), 100.0)
    table.settle("a", "acme")
    table.freed(["req-a"], 130.0)
    assert pauses.told == [("returned", "acme", 30.0)]


def test_a_pin_that_was_released_or_has_fallen_tells_only_that_none_came_before(
    table: PinTable, pauses: _Pauses
) -> None:
    table.add(_pin("a", ended=100.0), 100.0)
    table.add(_pin("b", ended=100.0), 100.0)
    table.release(["req-a"], ReleaseCause.ENDED)
    table.freed(["req-a"], 120.0)
    table.freed(["req-b"], 159.5)
    assert pauses.told == [("cut short", "", 20.0), ("cut short", "", 59.5)]


def test_a_release_is_counted_once_under_its_first_cause(
    table: PinTable, metrics: WorkerMetrics
) -> None:
    table.add(_pin("a", blocks=10), 0.0)
    table.release(["req-a"], ReleaseCause.BUDGET)
    table.release(["req-a", "req-unknown"], ReleaseCause.ENDED)
    assert _sample(metrics, "releases_total", cause="budget") == 1
    assert _sample(metrics, "releases_total", cause="ended") is None
    assert (table.retained_blocks, table.releasing_blocks) == (10, 10)
    table.freed(["req-a"], 1.0)
    assert (table.retained_blocks, table.releasing_blocks) == (0, 0)


def test_a_list_from_the_engine_replaces_what_was_known(
    table: PinTable, metrics: WorkerMetrics
) -> None:
    table.add(_pin("gone"), 100.0)
    table.add(_pin("kept", in_hand=True), 100.0)
    assert table.replace([_held("kept"), _held("new", num_blocks=7)], 200.0) == []
    assert {pin.turn_id for pin in table} == {"kept", "new"}
    kept, new = table.of_turn("kept"), table.of_turn("new")
    assert kept is not None
    assert new is not None
    assert (kept.deadline, kept.extension_seconds, kept.in_hand) == (240.0, 120.0, True)
    assert (new.ended_at, new.deadline, new.in_hand) == (60.0, 240.0, False)
    assert _sample(metrics, "retained_blocks") == 17


def test_a_pin_that_is_still_held_after_its_release_was_sent_is_named(table: PinTable) -> None:
    table.add(_pin("a"), 0.0)
    table.add(_pin("b"), 0.0)
    table.release(["req-a"], ReleaseCause.ENDED)
    assert [pin.turn_id for pin in table.replace([_held("a"), _held("b")], 5.0)] == ["a"]


def test_an_event_that_comes_after_the_list_that_had_its_pin_adds_none(table: PinTable) -> None:
    table.replace([_held("a")], 200.0)
    table.add(_pin("a", in_hand=True), 200.0)
    assert table.retained_blocks == 10
    pin = table.of_turn("a")
    assert pin is not None
    assert pin.in_hand


def test_a_confirmed_renewal_moves_the_deadline(table: PinTable) -> None:
    table.add(_pin("a"), 0.0)
    table.renewed([RenewedPin("req-a", 60.0, 40.0), RenewedPin("req-unknown", 60.0, 40.0)], 100.0)
    pin = table.of_turn("a")
    assert pin is not None
    assert (pin.deadline, pin.extension_seconds) == (160.0, 40.0)


def test_another_life_of_the_engine_holds_nothing_of_the_old_one(
    table: PinTable, metrics: WorkerMetrics, pauses: _Pauses
) -> None:
    table.add(_pin("a"), 0.0)
    table.connected(ENGINE, 1.0)
    assert len(table) == 1
    table.connected(EngineRef("engine-1", "epoch-2"), 2.0)
    assert len(table) == 0
    assert _sample(metrics, "retained_blocks") == 0
    assert table.of_turn("a") is None
    assert pauses.told == []


def test_a_pin_long_past_its_deadline_is_forgotten(table: PinTable) -> None:
    table.add(_pin("a"), 0.0)
    table.forget_overdue(65.0)
    assert len(table) == 1
    table.forget_overdue(71.0)
    assert len(table) == 0


def test_orphans_are_counted_while_they_last(table: PinTable, metrics: WorkerMetrics) -> None:
    for name in ("a", "b", "c"):
        table.add(_pin(name), 0.0)
    for pin in list(table):
        table.judge(pin, Standing.ORPHAN)
        table.judge(pin, Standing.ORPHAN)
    assert _sample(metrics, "orphan_pins") == table.num_orphans == 3
    a, b, c = list(table)
    table.judge(a, Standing.WANTED, tenant="acme", wanted_until=300.0)
    table.release([b.request_id], ReleaseCause.REQUESTED)
    table.freed([c.request_id], 1.0)
    assert _sample(metrics, "orphan_pins") == table.num_orphans == 0
    assert _sample(metrics, "orphan_pins_found_total") == 3


def test_a_verdict_that_comes_late_changes_nothing(table: PinTable) -> None:
    table.add(_pin("a"), 0.0)
    pin = table.of_turn("a")
    assert pin is not None
    table.freed(["req-a"], 1.0)
    table.judge(pin, Standing.ORPHAN)
    assert table.num_orphans == 0


def test_two_pins_of_one_turn_are_both_held_and_the_first_stands_for_it(table: PinTable) -> None:
    first, second = _pin("a"), _pin("a")
    second.request_id = "req-again"
    table.add(first, 0.0)
    table.add(second, 0.0)
    table.freed(["req-again"], 1.0)
    assert table.of_turn("a") is first
