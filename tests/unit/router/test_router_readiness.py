"""A router is ready while some model has a decode worker, and says so at once."""

from __future__ import annotations

import asyncio

from services.router.readiness import tell_readiness
from tests.flow.router.fakes import KeptHealth, eventually, make_worker
from tests.flow.router.stack import DECODE, PREFILL
from tests.unit.router.pool_harness import harness


async def test_it_is_ready_with_a_decode_worker_that_takes_turns() -> None:
    async with harness() as world:
        pool, worker = world.pool, make_worker("d0", DECODE)
        await pool.put(make_worker("p0", PREFILL))
        assert not pool.can_serve
        await pool.put(worker)
        assert pool.can_serve
        worker.state = worker.STATE_DRAINING
        await pool.put(worker)
        assert not pool.can_serve
        await pool.put(make_worker("d1", DECODE, model="another"))
        assert pool.can_serve
        pool.remove("d1")
        assert not pool.can_serve


async def test_a_worker_is_forgotten_when_its_grace_is_over_unless_it_comes_back() -> None:
    async with harness() as world:
        assert world.pool.forgets_in is None
        await world.pool.put(make_worker("d0", DECODE))
        await world.pool.put(make_worker("d1", DECODE))
        world.pool.keep_only({"d0"})
        world.now += 4
        world.pool.keep_only(set())
        assert world.pool.forgets_in == 6
        await world.pool.put(make_worker("d1", DECODE))
        assert world.pool.forgets_in == 10
        world.now += 11
        assert world.pool.forgets_in == 0
        assert world.pool.can_serve
        assert world.pool.forgets_in is None


async def test_health_hears_of_each_change() -> None:
    async with harness() as world, asyncio.TaskGroup() as tasks:
        heard = KeptHealth()
        telling = tasks.create_task(tell_readiness(world.pool, world.changed, heard))
        await eventually(lambda: heard.said == [False])
        await world.pool.put(make_worker("d0", DECODE))
        await eventually(lambda: heard.said == [False, True])
        world.pool.remove("d0")
        await eventually(lambda: heard.said == [False, True, False])
        telling.cancel()


async def test_health_hears_of_a_worker_that_is_forgotten_though_nobody_asks_for_it() -> None:
    async with harness(grace_seconds=0.05) as world, asyncio.TaskGroup() as tasks:
        heard = KeptHealth()
        await world.pool.put(make_worker("d0", DECODE))
        telling = tasks.create_task(tell_readiness(world.pool, world.changed, heard))
        await eventually(lambda: heard.said == [True])
        world.pool.keep_only(set())
        await eventually(lambda: heard.said[-1:] == [True] and len(heard.said) > 1)
        world.now += 1
        await eventually(lambda: heard.said[-1] is False)
        telling.cancel()
