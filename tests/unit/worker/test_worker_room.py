"""Room is made before anyone waits for it, and only of what nobody has been given."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvloop.errors import UnavailableError
from services.worker.budget import BlockShares, RetentionPolicy
from services.worker.engine import EngineGauges
from services.worker.event_messages import Pressure
from services.worker.pin_ledger import Verdict
from services.worker.pins import Pin, Standing
from services.worker.room import RoomKeeper, RoomRules
from tests.unit.worker.fakes import FakeEngine
from tests.unit.worker.pin_world import PinWorld

BLOCKS = 100


class _World(PinWorld):
    """The pins of an engine of 100 blocks of which 50 may be retained."""

    def __init__(self) -> None:
        super().__init__(num_kv_blocks=BLOCKS)
        self.engine = FakeEngine()
        self.engine.load = EngineGauges(1, 0, 0.5)
        self.legs = 1

    def retain_wanted(self, name: str, *, blocks: int = 10) -> Pin:
        """A pin that the ledger owns and has given to nobody."""
        self.ledger.knows(name, Verdict.WANTED, wanted_seconds=400)
        return self.retain(name, blocks=blocks)

    def released(self) -> list[str]:
        """Turns whose blocks the engine was told to free."""
        return [request_id.removeprefix("req-") for request_id in self.link.released]


@asynccontextmanager
async def _world(policy: RetentionPolicy = "lru") -> AsyncIterator[_World]:
    world = _World()
    room = RoomKeeper(
        world.hub,
        world.ledger,
        world.engine,
        working=lambda: world.legs > 0,
        clock=world.clock,
        metrics=world.metrics,
        rules=RoomRules(BlockShares(retained=0.5, free=0.1), policy, poll_seconds=2.0),
    )
    async with world.running(room.notice, room.run()):
        yield world


async def test_nothing_goes_within_the_budget() -> None:
    async with _world() as world:
        for name in "abcde":
            world.retain_wanted(name)
        await world.clock.advance(10)
        assert world.ledger.evictions == []


async def test_beyond_the_budget_the_longest_silent_goes() -> None:
    async with _world() as world:
        for name in "abcde":
            world.retain_wanted(name)
            await world.clock.advance(0.25)
        world.retain_wanted("f", blocks=11)
        await world.clock.settle()
        assert world.released() == ["a", "b"]
        assert world.sample("evictions_total", reason="budget") == 2
        assert world.sample("releases_total", cause="budget") == 2
        await world.clock.advance(10)  # what is on its way is not missed again
        assert len(world.ledger.evictions) == 1


async def test_by_value_the_tenant_that_never_returns_goes_first() -> None:
    async with _world("value") as world:
        for _ in range(50):
            world.hub.pins.pauses.returned("returns", 30)
            world.hub.pins.pauses.cut_short("leaves", 400)
        for name in "abcde":
            world.retain_wanted(name)
            world.hub.pins.settle(name, "leaves" if name == "d" else "returns")
            await world.clock.advance(0.25)
        world.retain_wanted("f")
        await world.clock.settle()
        assert world.released() == ["d"]


async def test_a_request_that_waits_for_blocks_gets_them_at_once() -> None:
    async with _world() as world:
        world.retain_wanted("a")
        world.retain_wanted("b")
        world.send(Pressure(blocks_needed=7))
        await world.clock.settle()
        assert world.released() == ["a"]
        assert world.sample("evictions_total", reason="pressure") == 1


async def test_pressure_while_blocks_come_free_asks_for_no_more() -> None:
    async with _world() as world:
        world.retain_wanted("a")
        world.retain_wanted("b")
        world.send(Pressure(blocks_needed=7))
        await world.clock.settle()
        world.send(Pressure(blocks_needed=7))
        await world.clock.settle()
        assert world.released() == ["a"]
        world.free()
        world.send(Pressure(blocks_needed=7))  # it was not enough after all
        await world.clock.settle()
        assert world.released() == ["b"]


async def test_blocks_are_kept_free_while_the_engine_works() -> None:
    async with _world() as world:
        world.retain_wanted("a")
        world.engine.load = EngineGauges(1, 0, 0.95)
        await world.clock.advance(2.5)
        assert world.released() == ["a"]
        assert world.sample("evictions_total", reason="low") == 1


async def test_an_engine_that_does_nothing_is_not_looked_at() -> None:
    async with _world() as world:
        world.retain_wanted("a")
        world.legs = 0
        world.engine.load = EngineGauges(0, 0, 0.95)
        await world.clock.advance(10)
        assert world.released() == []


async def test_what_was_given_out_meanwhile_stays_and_the_next_goes_instead() -> None:
    async with _world() as world:
        taken = world.retain_wanted("a")
        await world.clock.advance(0.25)
        world.retain_wanted("b")
        world.ledger.knows("a", Verdict.IN_USE)
        world.send(Pressure(blocks_needed=5))
        await world.clock.settle()
        assert world.ledger.evictions == [["a"], ["b"]]
        assert world.released() == ["b"]
        assert not taken.releasing


async def test_pins_in_use_in_hand_and_of_nobody_are_not_even_asked_for() -> None:
    async with _world() as world:
        in_use, orphan = world.retain_wanted("a"), world.retain_wanted("b")
        world.hub.pins.judge(in_use, Standing.IN_USE)
        world.hub.pins.judge(orphan, Standing.ORPHAN)
        world.retain("c", blocks=10, settled=False)
        world.send(Pressure(blocks_needed=5))
        await world.clock.advance(5)
        assert world.ledger.evictions == []
        assert world.released() == []


async def test_without_the_ledger_nothing_is_freed() -> None:
    async with _world() as world:
        world.retain_wanted("a")
        world.ledger.error = UnavailableError("down")
        world.send(Pressure(blocks_needed=5))
        await world.clock.advance(1)
        assert world.released() == []
        world.ledger.error = None
        world.send(Pressure(blocks_needed=5))
        await world.clock.advance(1)
        assert world.released() == ["a"]
