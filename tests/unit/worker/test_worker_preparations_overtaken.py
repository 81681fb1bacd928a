"""Legs that come before the bodies that were sent ahead of them, and bodies that are refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from kvloop.errors import InvalidFieldError, KvloopError, PreconditionError
from services.worker import preparations
from services.worker.decode import DecodeOrder
from services.worker.preparations import Preparations
from services.worker.tasks import background_tasks
from tests.unit.worker.preparations_world import (
    FIRST,
    LAST,
    LIMIT,
    USAGE,
    World,
)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with background_tasks() as tasks:
        yield World(tasks)


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leg that waits until its time is up fails its test."""
    monkeypatch.setattr(preparations, "ARRIVAL_SECONDS", 3600)


async def _decode(world: World) -> list[bytes] | str:
    """What a leg that comes without its body gets, or why it is turned away."""
    try:
        return await world.decode()
    except PreconditionError as error:
        return error.reason


async def _overtaking(world: World, group: asyncio.TaskGroup) -> asyncio.Task[list[bytes] | str]:
    """A leg that waits for its body."""
    leg = group.create_task(_decode(world))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not leg.done()
    return leg


def _invalid() -> DecodeOrder:
    raise InvalidFieldError("no JSON", field="body_json")


def _unread() -> DecodeOrder:
    raise AssertionError("it was refused before")


@pytest.mark.usefixtures("patience")
async def test_a_leg_that_overtakes_its_body_waits_for_it(world: World) -> None:
    async with asyncio.TaskGroup() as group:
        leg = await _overtaking(world, group)
        await world.hold()
        assert await leg == [FIRST, LAST, USAGE]
    assert len(world.engine.begun) == len(world.engine.bodies) == 1
    assert world.outcome("used") == 1
    await world.at_rest()


async def test_a_leg_waits_no_longer_than_a_moment_and_its_body_is_not_wanted_then(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparations, "ARRIVAL_SECONDS", 0.01)
    assert await _decode(world) == "NOT_PREPARED"
    with pytest.raises(PreconditionError) as caught:
        await world.preparations.hold("turn-1", _unread, {})
    assert caught.value.reason == "TURN_RUNNING"
    await world.at_rest()


@pytest.mark.usefixtures("patience")
async def test_a_leg_whose_body_is_refused_waits_no_longer(world: World) -> None:
    async with asyncio.TaskGroup() as group:
        leg = await _overtaking(world, group)
        with pytest.raises(InvalidFieldError):
            await world.preparations.hold("turn-1", _invalid, {})
        assert await leg == "NOT_PREPARED"
    assert world.engine.begun == []
    await world.at_rest()


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("reason", ["TOO_MANY_PREPARED", "DRAINING", "INVALID_FIELD"])
async def test_a_leg_whose_body_was_refused_does_not_wait(world: World, reason: str) -> None:
    async with AsyncExitStack() as others:
        if reason == "TOO_MANY_PREPARED":
            for number in range(LIMIT):
                await others.enter_async_context(world.prepared(f"other-{number}"))
        if reason == "DRAINING":
            world.admission.drain()
        read = _invalid if reason == "INVALID_FIELD" else _unread
        with pytest.raises(KvloopError) as caught:
            await world.preparations.hold("turn-1", read, {})
        assert caught.value.reason == reason
        assert await _decode(world) == "NOT_PREPARED"
    await world.at_rest()


@pytest.mark.usefixtures("patience")
async def test_a_leg_whose_body_was_given_up_does_not_wait(world: World) -> None:
    async with world.prepared() as call:
        call.cancel()
        await asyncio.wait([call])
    assert await _decode(world) == "NOT_PREPARED"
    await world.at_rest()


@pytest.mark.usefixtures("patience")
async def test_a_body_whose_leg_waits_needs_no_place_and_is_taken_by_a_worker_that_drains(
    world: World,
) -> None:
    async with AsyncExitStack() as others, asyncio.TaskGroup() as group:
        for number in range(LIMIT):
            await others.enter_async_context(world.prepared(f"other-{number}"))
        leg = await _overtaking(world, group)
        world.admission.drain()
        await world.hold()
        assert await leg == [FIRST, LAST, USAGE]
    await world.at_rest()


@pytest.mark.usefixtures("patience")
async def test_a_second_leg_of_the_turn_does_not_wait(world: World) -> None:
    async with asyncio.TaskGroup() as group:
        leg = await _overtaking(world, group)
        assert await _decode(world) == "NOT_PREPARED"
        await world.hold()
        assert await leg == [FIRST, LAST, USAGE]
    await world.at_rest()


@pytest.mark.usefixtures("patience")
async def test_a_leg_that_waits_gets_the_first_of_two_bodies(world: World) -> None:
    async with asyncio.TaskGroup() as group:
        leg = await _overtaking(world, group)
        first = group.create_task(world.hold())
        await asyncio.sleep(0)
        assert len(world.preparations) == 1  # and the leg has not noticed yet
        with pytest.raises(PreconditionError) as caught:
            await world.preparations.hold("turn-1", _unread, {})
        await first
        assert await leg == [FIRST, LAST, USAGE]
    assert caught.value.reason == "TURN_RUNNING"
    await world.at_rest()


@pytest.mark.usefixtures("patience")
async def test_a_leg_that_comes_with_its_body_ends_the_one_that_waits(world: World) -> None:
    async with asyncio.TaskGroup() as group:
        leg = await _overtaking(world, group)
        world.preparations.discard("turn-1")
        assert await leg == "NOT_PREPARED"
    await world.at_rest()


@pytest.mark.usefixtures("patience")
async def test_a_leg_that_is_cancelled_while_it_waits_leaves_nothing(world: World) -> None:
    async with asyncio.TaskGroup() as group:
        leg = await _overtaking(world, group)
        leg.cancel()
        await asyncio.wait([leg])
    with pytest.raises(PreconditionError) as caught:
        await world.preparations.hold("turn-1", _unread, {})
    assert caught.value.reason == "TURN_RUNNING"
    await world.at_rest()


@pytest.mark.usefixtures("patience")
async def test_a_leg_that_is_cancelled_as_its_body_comes_leaves_nothing(world: World) -> None:
    async with asyncio.TaskGroup() as group:
        leg = await _overtaking(world, group)
        bringing = asyncio.create_task(world.hold())
        await asyncio.sleep(0)
        assert len(world.preparations) == 1
        leg.cancel()
        with pytest.raises(PreconditionError) as caught:
            await bringing
    assert caught.value.reason == "TURN_RUNNING"
    assert world.engine.bodies == []
    await world.at_rest()


@pytest.mark.usefixtures("patience")
async def test_a_worker_that_keeps_no_bodies_waits_for_none(world: World) -> None:
    none = Preparations[DecodeOrder](
        world.engine, world.admission, world.metrics, world.tasks, limit=0
    )
    with pytest.raises(PreconditionError) as caught:
        async with none.claim("turn-1"):
            pass
    assert caught.value.reason == "NOT_PREPARED"


async def test_a_body_that_is_refused_is_not_read(world: World) -> None:
    async with world.prepared("turn-1"), world.prepared("turn-2"):
        for turn_id, reason in (("turn-1", "TURN_RUNNING"), ("turn-3", "TOO_MANY_PREPARED")):
            with pytest.raises(KvloopError) as caught:
                await world.preparations.hold(turn_id, _unread, {})
            assert caught.value.reason == reason
    world.admission.drain()
    with pytest.raises(KvloopError) as caught:
        await world.preparations.hold("turn-4", _unread, {})
    assert caught.value.reason == "DRAINING"


async def test_turns_of_long_ago_are_forgotten(world: World) -> None:
    world.preparations.discard("turn-1")
    for number in range(2000):
        world.preparations.discard(f"other-{number}")
    async with world.prepared("turn-1"):
        assert await world.decode() == [FIRST, LAST, USAGE]
    await world.at_rest()
