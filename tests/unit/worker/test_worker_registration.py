"""A worker stays registered, whatever happens to the registry or its engine."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from kvloop.errors import DeadlineError, PreconditionError, UnavailableError
from kvloop.kvmeta.v1 import registry_pb2
from services.worker.event_hub import EventHub
from services.worker.metrics import WorkerMetrics
from services.worker.registration import HEARD_SECONDS, Registration
from services.worker.tasks import background_tasks
from tests.unit.worker.fakes import FakeClock, FakeLink, FakeRegistry, hello, until

pytestmark = pytest.mark.asyncio(loop_factories=["leaping"])

REFUSAL = PreconditionError("ttl too long", reason="LEDGER_TTL_TOO_LONG")
DOWN = UnavailableError("down")
SHORT = 0.06  # seconds; renewals come after a third of it


@dataclass
class _World:
    registry: FakeRegistry = field(default_factory=FakeRegistry)
    clock: FakeClock = field(default_factory=FakeClock)

    def __post_init__(self) -> None:
        self.hub = EventHub(self.clock, WorkerMetrics())
        self.registration = Registration(
            self.registry,
            self.hub,
            lambda hello: registry_pb2.Worker(worker_id=f"decode-0 {hello.epoch}"),
            self.clock,
            ttl_seconds=15,
        )


@pytest.fixture
def world() -> _World:
    world = _World()
    world.hub.connected(hello(), FakeLink())
    return world


async def test_it_registers_and_renews(world: _World) -> None:
    world.registry.granted = world.registry.renewed = SHORT
    async with background_tasks() as tasks:
        tasks.start(world.registration.run(), name="registration")
        await until(lambda: len(world.registry.renewals) >= 3)
    assert len(world.registry.registered) == 1
    assert world.registry.renewals[0] == ("lease-1", False)
    assert world.registration.registered


async def test_routers_have_heard_of_it_some_time_after_its_first_registration(
    world: _World,
) -> None:
    world.registry.failures = [DOWN]
    async with background_tasks() as tasks:
        heard = tasks.start(world.registration.heard_of(), name="heard of")
        await asyncio.sleep(0.01)
        assert world.clock.slept == []
        tasks.start(world.registration.run(), name="registration")
        await heard
    assert len(world.registry.registered) == 1
    assert world.clock.slept[-1] == HEARD_SECONDS


async def test_it_renews_at_a_third_of_the_lease(world: _World) -> None:
    world.registry.granted = world.registry.renewed = 3.0
    loop = asyncio.get_running_loop()
    async with background_tasks() as tasks:
        tasks.start(world.registration.run(), name="registration")
        await until(lambda: world.registration.registered)
        registered_at = loop.time()
        await until(lambda: world.registry.renewals)
        assert loop.time() - registered_at == pytest.approx(1.0, abs=0.01)


async def test_without_an_engine_it_waits(world: _World) -> None:
    silent = _World()
    async with background_tasks() as tasks:
        tasks.start(silent.registration.run(), name="registration")
        await asyncio.sleep(0.01)
        assert silent.registry.registered == []
        silent.hub.connected(hello(), FakeLink())
        await until(lambda: silent.registry.registered)


async def test_a_lost_lease_means_registering_again(world: _World) -> None:
    world.registry.granted = SHORT
    world.registry.renewed = 0
    async with background_tasks() as tasks:
        tasks.start(world.registration.run(), name="registration")
        await until(lambda: len(world.registry.registered) >= 2)


async def test_a_new_life_of_the_engine_is_registered_at_once(world: _World) -> None:
    async with background_tasks() as tasks:
        tasks.start(world.registration.run(), name="registration")
        await until(lambda: world.registration.registered)
        world.hub.connected(hello(epoch="epoch-2"), FakeLink())
        await until(lambda: len(world.registry.registered) == 2)
    assert [worker.worker_id for worker in world.registry.registered] == [
        "decode-0 epoch-1",
        "decode-0 epoch-2",
    ]


async def test_an_outage_is_waited_out_with_growing_pauses(world: _World) -> None:
    world.registry.failures = [DOWN] * 6 + [DeadlineError("late")]
    async with background_tasks() as tasks:
        tasks.start(world.registration.run(), name="registration")
        await until(lambda: world.registration.registered)
    pauses = world.clock.slept
    assert len(pauses) == 7
    assert pauses[0] <= 0.2
    assert 2.5 <= pauses[-1] <= 5.0


async def test_an_outage_between_renewals_keeps_the_lease(world: _World) -> None:
    world.registry.granted = world.registry.renewed = SHORT
    async with background_tasks() as tasks:
        tasks.start(world.registration.run(), name="registration")
        await until(lambda: world.registry.renewals)
        world.registry.failures = [DOWN] * 3
        seen = len(world.registry.renewals)
        await until(lambda: len(world.registry.renewals) > seen)
    assert len(world.registry.registered) == 1


async def test_a_lease_that_has_run_out_is_no_registration(world: _World) -> None:
    async with background_tasks() as tasks:
        tasks.start(world.registration.run(), name="registration")
        await until(lambda: world.registration.registered)
        world.clock.now += 31
        assert not world.registration.registered


async def test_a_first_refusal_ends_it(world: _World) -> None:
    world.registry.failures = [REFUSAL]
    with pytest.raises(PreconditionError) as caught:
        await world.registration.run()
    assert caught.value is REFUSAL


async def test_a_later_refusal_does_not(world: _World) -> None:
    world.registry.granted = SHORT
    async with background_tasks() as tasks:
        tasks.start(world.registration.run(), name="registration")
        await until(lambda: world.registration.registered)
        world.registry.renewed = 0
        await until(lambda: world.registry.renewals)
        world.registry.failures = [REFUSAL] * 2
        seen = len(world.registry.registered)
        await until(lambda: len(world.registry.registered) > seen)


async def test_draining_is_told_at_once_and_repeated(world: _World) -> None:
    world.registry.granted = world.registry.renewed = SHORT
    async with background_tasks() as tasks:
        tasks.start(world.registration.run(), name="registration")
        await until(lambda: world.registration.registered)
        await world.registration.drain()
        assert world.registry.renewals[-1] == ("lease-1", True)
        seen = len(world.registry.renewals)
        await until(lambda: len(world.registry.renewals) > seen)
    assert world.registry.renewals[-1] == ("lease-1", True)


async def test_a_draining_worker_that_registers_again_stays_draining(world: _World) -> None:
    world.registry.granted, world.registry.renewed = SHORT, 0
    await world.registration.drain()
    async with background_tasks() as tasks:
        tasks.start(world.registration.run(), name="registration")
        await until(lambda: world.registry.registered)
    assert world.registry.registered[0].state == registry_pb2.Worker.STATE_DRAINING


async def test_leaving_ends_the_lease_once(world: _World) -> None:
    async with background_tasks() as tasks:
        tasks.start(world.registration.run(), name="registration")
        await until(lambda: world.registration.registered)
    await world.registration.leave()
    await world.registration.leave()
    assert world.registry.ended == ["lease-1"]
    assert not world.registration.registered


async def test_a_registry_that_is_down_does_not_hold_up_the_farewell(world: _World) -> None:
    async with background_tasks() as tasks:
        tasks.start(world.registration.run(), name="registration")
        await until(lambda: world.registration.registered)
    world.registry.failures = [DOWN, DOWN]
    await world.registration.drain()
    await world.registration.leave()
    assert world.registry.ended == []
