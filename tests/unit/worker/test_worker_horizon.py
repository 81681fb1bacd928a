"""How long to wait for a conversation's next turn."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.worker.budget import BlockShares
from services.worker.gaps import PauseHistory
from services.worker.horizon import horizon_seconds, kept_anyway
from services.worker.pin_ledger import Verdict
from services.worker.pins import Pin, Standing
from services.worker.room import RoomKeeper, RoomRules
from tests.unit.worker.fakes import FakeEngine
from tests.unit.worker.pin_world import PinWorld

TTL = 480.0
KEPT = next(name for name in map(str, range(1000)) if kept_anyway(name))
OTHER = next(name for name in map(str, range(1000)) if not kept_anyway(name))


def history(*pauses: float, abandoned: int = 0) -> PauseHistory:
    found = PauseHistory()
    for pause in pauses:
        found.returned("t", pause)
    for _ in range(abandoned):
        found.cut_short("t", TTL)
    return found


def horizon(pauses: PauseHistory, lost_share: float = 0.01) -> float:
    return horizon_seconds(pauses.outlook("t"), ttl_seconds=TTL, lost_share=lost_share)


def test_where_nothing_is_known_nearly_all_of_the_ttl_is_waited() -> None:
    assert horizon(PauseHistory()) > 0.6 * TTL


def test_short_pauses_give_a_short_horizon_however_many_are_abandoned() -> None:
    pauses = [random.Random(1).lognormvariate(1.6, 1.0) for _ in range(2000)]
    assert horizon(history(*pauses)) < 120
    assert horizon(history(*pauses, abandoned=500)) < 240


def test_long_pauses_give_a_long_horizon() -> None:
    assert horizon(history(*[5.0] * 500, *[400.0] * 20)) > 390


def test_a_larger_share_of_lost_turns_shortens_the_horizon() -> None:
    rng = random.Random(2)
    pauses = history(*[rng.lognormvariate(2.5, 1.2) for _ in range(2000)])
    horizons = [horizon(pauses, share) for share in (0.001, 0.01, 0.05, 0.2)]
    assert horizons == sorted(horizons, reverse=True)
    assert horizons[0] > horizons[-1]


def test_a_horizon_never_exceeds_the_ttl() -> None:
    assert horizon(history(*[470.0] * 1000), 0.0) == TTL


def test_one_in_sixteen_is_kept_to_its_end() -> None:
    kept = sum(kept_anyway(f"turn-{number}") for number in range(16_000))
    assert kept == pytest.approx(1000, rel=0.15)


class _World(PinWorld):
    """An engine with more than enough room, and a tenant that pauses 3 s at most."""

    def __init__(self) -> None:
        super().__init__(num_kv_blocks=10_000)
        for _ in range(2000):
            self.hub.pins.pauses.returned("agents", 3.0)

    def retain_wanted(
        self, name: str, *, wanted_seconds: float = TTL, tenant: str = "agents"
    ) -> Pin:
        """A pin that the ledger owns, has told of, and has given to nobody."""
        self.ledger.knows(name, Verdict.WANTED, wanted_seconds=wanted_seconds)
        pin = self.retain(name, ttl=TTL)
        until = self.clock.monotonic() + wanted_seconds
        self.hub.pins.judge(pin, Standing.WANTED, tenant=tenant, wanted_until=until)
        return pin

    def released(self) -> list[str]:
        return [request_id.removeprefix("req-") for request_id in self.link.released]


@asynccontextmanager
async def _world(lost_share: float = 0.01) -> AsyncIterator[_World]:
    world = _World()
    room = RoomKeeper(
        world.hub,
        world.ledger,
        FakeEngine(),
        working=lambda: False,
        clock=world.clock,
        metrics=world.metrics,
        rules=RoomRules(BlockShares(1.0, 0.0), "value", poll_seconds=2.0, lost_share=lost_share),
    )
    async with world.running(room.notice, room.run()):
        yield world


async def test_beyond_the_horizon_a_conversation_is_given_up() -> None:
    async with _world() as world:
        world.retain_wanted(OTHER)
        await world.clock.advance(2.5)
        assert world.released() == []
        await world.clock.advance(60)
        assert world.released() == [OTHER]
        assert world.sample("evictions_total", reason="overdue") == 1


async def test_one_that_is_kept_to_see_is_not() -> None:
    async with _world() as world:
        world.retain_wanted(KEPT)
        await world.clock.advance(120)
        assert world.released() == []


async def test_one_that_asked_for_more_than_the_engines_ttl_is_not() -> None:
    async with _world() as world:
        world.retain_wanted(OTHER, wanted_seconds=1200)
        await world.clock.advance(120)
        assert world.released() == []


async def test_one_that_a_turn_has_taken_meanwhile_is_not() -> None:
    async with _world() as world:
        pin = world.retain_wanted(OTHER)
        world.hub.pins.judge(pin, Standing.IN_USE)
        await world.clock.advance(120)
        assert world.released() == []


async def test_switched_off_nothing_is_given_up() -> None:
    async with _world(lost_share=0.0) as world:
        world.retain_wanted(OTHER)
        await world.clock.advance(120)
        assert world.released() == []
