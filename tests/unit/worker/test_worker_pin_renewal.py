"""Pins live exactly as long as the ledger wants them, and the engine confirms."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvloop.errors import KvloopError, PreconditionError, UnavailableError
from services.worker.event_messages import RetainedPin
from services.worker.pin_ledger import Verdict
from services.worker.pin_renewal import PinRenewal, RenewalLimits, lease_seconds
from services.worker.pins import Pin, Standing
from tests.unit.worker.fakes import ENGINE
from tests.unit.worker.pin_world import PinWorld

LEASE = 60.0
ROUND = LEASE / 3


@asynccontextmanager
async def _world(**engine: Any) -> AsyncIterator[PinWorld]:
    world = PinWorld(**engine)
    renewal = PinRenewal(
        world.hub,
        world.ledger,
        world.clock,
        world.metrics,
        RenewalLimits(audit_seconds=ROUND, settle_seconds=30.0),
    )
    async with world.running(renewal.notice, renewal.run()):
        yield world


def _held(name: str, **changes: Any) -> RetainedPin:
    fields: dict[str, Any] = {
        "request_id": f"req-{name}",
        "turn_id": name,
        "num_tokens": 64,
        "num_blocks": 2,
        "remaining_seconds": 40.0,
        "extension_seconds": 0.0,
        "age_seconds": 20.0,
    }
    return RetainedPin(**(fields | changes))


@pytest.mark.parametrize(
    ("left", "wanted", "expected"),
    [
        (60.0, 400.0, None),  # fresh
        (51.0, 400.0, None),  # less than a sixth has run
        (49.0, 400.0, 60.0),
        (21.0, 400.0, 60.0),
        (40.0, 45.0, 55.0),  # the conversation wants less than a lease
        (40.0, 5.0, None),  # and has more than that already
        (12.0, 5.0, 15.0),
        (8.0, 0.0, 10.0),
    ],
)
def test_how_long_a_renewal_is(left: float, wanted: float, expected: float | None) -> None:
    pin = Pin("r", "t", 64, 2, ended_at=0.0, deadline=1000.0 + left)
    assert lease_seconds(pin, wanted, pin_lease_seconds=LEASE, now=1000.0) == expected


async def test_a_wanted_pin_is_renewed_confirmed_and_told_to_the_ledger() -> None:
    async with _world() as world:
        world.retain("a")
        world.ledger.knows("a", Verdict.WANTED, wanted_seconds=400)
        await world.clock.advance(ROUND)
        assert world.link.renewed == [("req-a", LEASE)]
        ((asked,),) = world.ledger.audits
        assert (asked.turn_id, asked.remaining_seconds) == ("a", 40.0)
        assert asked.extension_seconds == 0

        world.confirm()
        await world.clock.settle()
        ((told,),) = world.ledger.audits[1:]
        assert (told.remaining_seconds, told.extension_seconds) == (60.0, 20.0)
        assert world.link.renewed == []  # telling is not asking
        assert world.sample("pin_renewals_total") == 1


async def test_at_least_half_of_a_lease_is_left_at_any_time() -> None:
    async with _world() as world:
        pin = world.retain("a")
        world.ledger.knows("a", Verdict.WANTED, wanted_seconds=4000)
        for _ in range(400):
            await world.clock.advance(0.5)
            if world.link.renewed:
                world.confirm()
            assert pin.deadline - world.clock.monotonic() >= LEASE / 2 - 0.5


async def test_a_pin_in_use_is_left_alone() -> None:
    async with _world() as world:
        pin = world.retain("a")
        world.ledger.knows("a", Verdict.IN_USE)
        await world.clock.advance(ROUND)
        assert (world.link.renewed, world.link.released) == ([], [])
        assert pin.standing is Standing.IN_USE
        assert world.sample("orphan_pins") == 0


async def test_an_unwanted_pin_is_released_at_once_and_asked_about_no_more() -> None:
    async with _world() as world:
        world.retain("a")
        world.ledger.knows("a", Verdict.RELEASE)
        await world.clock.advance(ROUND)
        assert world.link.released == ["req-a"]
        assert world.sample("releases_total", cause="unwanted") == 1
        await world.clock.advance(ROUND)
        assert len(world.ledger.audits) == 1


async def test_a_pin_that_no_row_owns_is_an_orphan_once_no_commit_can_be_under_way() -> None:
    async with _world() as world:
        pin = world.retain("a")
        await world.clock.advance(ROUND)
        assert world.sample("orphan_pins") == 0
        await world.clock.advance(ROUND)
        assert world.sample("orphan_pins") == 1
        assert world.sample("orphan_pins_found_total") == 1
        assert (world.link.renewed, world.link.released) == ([], [])
        await world.clock.advance(ROUND)
        assert pin.deadline <= world.clock.monotonic()
        await world.clock.advance(ROUND)  # the engine's word that it is free was lost
        assert world.sample("orphan_pins") == 0


async def test_a_pin_whose_commit_is_under_way_is_not_asked_about() -> None:
    async with _world() as world:
        pin = world.retain("a", settled=False)
        await world.clock.advance(2 * ROUND)
        assert world.ledger.audits == []
        assert pin.standing is Standing.UNKNOWN


async def test_a_pin_of_no_turn_is_not_the_ledgers_business() -> None:
    async with _world() as world:
        world.holds(_held("a", turn_id=""))
        await world.clock.advance(2 * ROUND)
        assert world.ledger.audits == []
        assert world.sample("orphan_pins") == 0


async def test_after_a_restart_what_the_engine_holds_is_looked_after_at_once() -> None:
    async with _world() as world:
        world.ledger.knows("a", Verdict.WANTED, wanted_seconds=400, tenant="acme")
        world.ledger.knows("b", Verdict.RELEASE)
        world.holds(_held("a"), _held("b"), _held("c", age_seconds=31.0))
        await world.clock.settle()
        assert world.link.renewed == [("req-a", LEASE)]
        assert world.link.released == ["req-b"]
        assert world.sample("orphan_pins") == 1
        assert world.sample("retained_pins") == 3
        pin = world.hub.pins.of_turn("a")
        assert pin is not None
        assert pin.tenant == "acme"


@pytest.mark.parametrize(
    "error",
    [UnavailableError("down"), PreconditionError("not yet registered", reason="ENGINE_GONE")],
)
async def test_an_outage_of_the_ledger_stops_renewals_and_ends_with_it(error: KvloopError) -> None:
    async with _world() as world:
        world.retain("a")
        world.ledger.knows("a", Verdict.WANTED, wanted_seconds=400)
        world.ledger.error = error
        await world.clock.advance(ROUND + 10)
        assert (world.link.renewed, world.link.released) == ([], [])
        assert (world.sample("pin_audits_failed_total", reason=error.reason) or 0) >= 2
        world.ledger.error = None
        await world.clock.advance(5)
        assert world.link.renewed == [("req-a", LEASE)]


async def test_a_second_word_that_the_ledger_missed_comes_with_the_next_round() -> None:
    async with _world() as world:
        world.retain("a")
        world.ledger.knows("a", Verdict.WANTED, wanted_seconds=400)
        await world.clock.advance(ROUND)
        world.ledger.error = UnavailableError("down")
        world.confirm()
        await world.clock.settle()
        world.ledger.error = None
        await world.clock.advance(1)
        assert world.ledger.audits[-1][0].extension_seconds == 20.0


async def test_without_a_connection_nothing_is_renewed_and_nothing_waits_for_one() -> None:
    async with _world() as world:
        world.retain("a")
        world.ledger.knows("a", Verdict.WANTED, wanted_seconds=400)
        world.hub.disconnected(ENGINE, world.link)
        await world.clock.advance(ROUND)
        assert world.link.renewed == []
        world.holds(_held("a", age_seconds=ROUND, remaining_seconds=LEASE - ROUND))
        await world.clock.settle()
        assert world.link.renewed == [("req-a", LEASE)]


async def test_engines_without_renewal_are_audited_and_never_asked_to_renew() -> None:
    async with _world(lease_renewal=False, pin_lease_seconds=0.0) as world:
        world.retain("wanted", ttl=480)
        world.retain("done", ttl=480)
        world.retain("lost", ttl=480)
        world.ledger.knows("wanted", Verdict.WANTED, wanted_seconds=400)
        world.ledger.knows("done", Verdict.RELEASE)
        await world.clock.advance(2 * ROUND)
        assert world.link.renewed == []
        assert world.link.released == ["req-done"]
        assert world.sample("orphan_pins") == 1


async def test_an_idle_worker_asks_nobody_anything() -> None:
    async with _world() as world:
        await world.clock.advance(10 * ROUND)
        assert world.ledger.audits == []
