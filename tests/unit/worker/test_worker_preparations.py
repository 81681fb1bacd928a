"""Bodies of decode legs that come before their params."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from itertools import product

import pytest

from kvloop.errors import (
    KvloopError,
    LimitError,
    PreconditionError,
    UnavailableError,
)
from services.worker.decode import DecodeSummary
from services.worker.decode_body import read_decode_body
from services.worker.engine import DONE, Api
from services.worker.tasks import BackgroundTasks, background_tasks
from tests.unit.worker.awaits import CancelledAt
from tests.unit.worker.fakes import until
from tests.unit.worker.preparations_world import (
    FIRST,
    LAST,
    LIMIT,
    PARAMS,
    USAGE,
    World,
    decode_order,
)

pytestmark = pytest.mark.asyncio(loop_factories=["leaping"])


@pytest.fixture
async def tasks() -> AsyncIterator[BackgroundTasks]:
    async with background_tasks() as tasks:
        yield tasks


@pytest.fixture
def world(tasks: BackgroundTasks) -> World:
    return World(tasks)


async def test_a_prepared_leg_is_answered_as_any_other(world: World) -> None:
    async with world.prepared() as call:
        assert await world.decode() == [FIRST, LAST, USAGE]
        await call
    assert world.engine.bodies == [
        {
            "messages": [],
            "stream": True,
            "stream_options": {"include_usage": True},
            "kv_transfer_params": {"kvloop_turn_id": "turn-1", "remote_port": 1},
        }
    ]
    assert world.engine.begun[0].headers == {"a": "b"}
    assert world.outcome("used") == 1
    await world.at_rest()


async def test_the_call_that_brought_the_body_ends_once_the_leg_has_it(world: World) -> None:
    world.engine.answers.clear()
    async with world.prepared() as call, asyncio.TaskGroup() as group:
        leg = group.create_task(world.decode())
        await call  # though the engine has not answered yet
        world.engine.answers.set()
        assert await leg == [FIRST, LAST, USAGE]
    await world.at_rest()


async def test_a_leg_outlives_the_call_that_brought_its_body(world: World) -> None:
    async with world.prepared() as call:
        async with world.preparations.claim("turn-1") as (order, begun):
            order = replace(order, params=PARAMS, begun=begun)
            call.cancel()  # before it could answer
            await asyncio.wait([call])
            events = [event async for event in world.leg.run(order)]
    assert isinstance(events[-1], DecodeSummary)
    await world.at_rest()


async def test_a_call_that_ends_first_gives_the_body_up(world: World) -> None:
    async with world.prepared() as call:
        call.cancel()
        await asyncio.wait([call])
        with pytest.raises(PreconditionError) as caught:
            await world.decode()
    assert caught.value.reason == "NOT_PREPARED"
    assert world.outcome("given_up") == 1
    await world.at_rest()


async def test_a_leg_that_nobody_prepared_is_turned_away_untouched(world: World) -> None:
    with pytest.raises(PreconditionError) as caught:
        await world.decode()
    assert caught.value.reason == "NOT_PREPARED"
    assert world.engine.bodies == []
    await world.at_rest()


async def test_a_leg_is_claimed_once(world: World) -> None:
    world.engine.answers.clear()
    async with world.prepared(), asyncio.TaskGroup() as group:
        leg = group.create_task(world.decode())
        await until(lambda: world.engine.bodies)
        with pytest.raises(PreconditionError, match="turn-1"):
            await world.decode()
        world.engine.answers.set()
        assert await leg
    await world.at_rest()


async def test_a_body_that_the_engine_has_no_more_is_sent_anew(world: World) -> None:
    async with world.prepared():
        world.engine.begun[0].break_off()
        await until(lambda: world.engine.connections == 0)
        assert await world.decode() == [FIRST, LAST, USAGE]
    assert len(world.engine.bodies) == 1
    assert world.engine.bodies[0]["kv_transfer_params"]["remote_port"] == 1
    assert (world.outcome("resent"), world.outcome("used")) == (1, 0)
    await world.at_rest()


@pytest.mark.parametrize("broken", [False, True])
async def test_a_whole_reply_comes_for_both_parts_and_anew(world: World, broken: bool) -> None:
    reply = b'{"choices":[{"index":0,"finish_reason":"stop"}]}'
    world.engine.replies = [reply]
    body = read_decode_body(Api.CHAT_COMPLETIONS, b'{"messages":[]}', whole=True)
    order = replace(decode_order(), body=body, whole=True, conversation=None)
    async with asyncio.TaskGroup() as group:
        group.create_task(world.preparations.hold("turn-1", lambda: order, {}))
        await until(lambda: world.engine.connections)
        if broken:
            world.engine.begun[-1].break_off()
            await until(lambda: world.engine.connections == 0)
        assert await world.decode() == [reply]
    await world.at_rest()
    assert [body.keys() for body in world.engine.bodies] == [{"messages", "kv_transfer_params"}]


async def test_a_turn_is_prepared_once(world: World) -> None:
    async with world.prepared():
        with pytest.raises(PreconditionError) as caught:
            await world.hold()
        assert caught.value.reason == "TURN_RUNNING"
        assert await world.decode()  # with the body that came first
    await world.at_rest()


async def test_a_body_that_comes_after_its_leg_came_with_one_is_turned_away(world: World) -> None:
    world.preparations.discard("turn-1")
    with pytest.raises(PreconditionError) as caught:
        await world.hold()
    assert caught.value.reason == "TURN_RUNNING"
    assert world.engine.begun == []
    await world.at_rest()


@pytest.mark.parametrize("ended", [False, True])
async def test_a_body_that_comes_again_after_its_leg_is_turned_away(
    world: World, ended: bool
) -> None:
    world.engine.answers.clear()
    async with world.prepared(), asyncio.TaskGroup() as group:
        leg = group.create_task(world.decode())
        await until(lambda: world.engine.bodies)
        if ended:
            world.engine.answers.set()
            await leg
        with pytest.raises(PreconditionError) as caught:
            await world.hold()
        world.engine.answers.set()
    assert caught.value.reason == "TURN_RUNNING"
    assert len(world.engine.begun) == 1
    await world.at_rest()


async def test_a_body_that_comes_in_another_way_takes_the_place_of_the_one_that_waits(
    world: World,
) -> None:
    with pytest.RaisesGroup(PreconditionError):
        async with world.prepared():
            world.preparations.discard("turn-1")
            world.preparations.discard("turn-1")
            await world.at_rest()
    assert world.outcome("given_up") == 1


async def test_so_many_wait_and_no_more(world: World) -> None:
    async with world.prepared("turn-1"), world.prepared("turn-2"):
        with pytest.raises(LimitError) as caught:
            await world.hold("turn-3")
        assert caught.value.reason == "TOO_MANY_PREPARED"
        assert await world.decode("turn-2")
        async with world.prepared("turn-3"):
            assert len(world.preparations) == LIMIT
    await world.at_rest()


async def test_a_worker_that_drains_prepares_nothing_and_gives_up_what_waits(
    world: World,
) -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(UnavailableError, check=_is_draining)):
        async with world.prepared():
            world.admission.drain()
            world.preparations.drain()
            await world.at_rest()
    with pytest.raises(UnavailableError) as caught:
        await world.hold()
    assert _is_draining(caught.value)


def _is_draining(error: KvloopError) -> bool:
    return error.reason == "DRAINING"


async def test_a_leg_that_fails_before_it_asks_closes_its_request(world: World) -> None:
    async with world.prepared():
        with world.hub.watch("turn-1"), pytest.raises(PreconditionError):
            await world.decode()
    assert world.engine.bodies == []
    await world.at_rest()


async def test_a_request_whose_task_never_ran_keeps_no_leg_waiting(world: World) -> None:
    """All tasks are cancelled when the engine has ended, also those that have not begun."""
    async with asyncio.TaskGroup() as group:
        group.create_task(world.hold())
        await asyncio.sleep(0)
        world.tasks.cancel()
        assert FIRST in await world.decode()
    assert world.outcome("resent") == 1
    assert not world.engine.begun[0].connected


@pytest.mark.parametrize("first", ["hold", "decode"])
async def test_both_calls_may_be_cancelled_at_any_await(tasks: BackgroundTasks, first: str) -> None:
    reached = 0
    for which, number in product(("hold", "decode"), range(12)):
        world = World(tasks)
        gate = asyncio.Event()
        world.engine.script = [FIRST, gate, LAST, DONE]
        calls = {
            "hold": CancelledAt(_hold_if_wanted(world), number if which == "hold" else -1),
            "decode": CancelledAt(_decode_if_prepared(world), number if which == "decode" else -1),
        }
        async with asyncio.TaskGroup() as group:
            group.create_task(calls[first].run())
            await asyncio.sleep(0)
            group.create_task(calls["decode" if first == "hold" else "hold"].run())
            for _ in range(20):
                await asyncio.sleep(0)
            gate.set()
        await world.at_rest()
        reached += sum(call.reached for call in calls.values())
    assert reached >= 4


@pytest.mark.parametrize("first", ["hold", "decode"])
async def test_both_calls_may_end_at_every_step_of_the_loop(
    tasks: BackgroundTasks, first: str
) -> None:
    for ends, before, after in product(("hold", "decode", "both"), range(3), range(25)):
        world = World(tasks)
        world.engine.script = [FIRST, asyncio.Event()]
        calls = {"hold": _hold_if_wanted(world), "decode": _decode_if_prepared(world)}
        async with asyncio.TaskGroup() as group:
            running = {first: group.create_task(calls.pop(first))}
            for _ in range(before):
                await asyncio.sleep(0)
            running |= {name: group.create_task(call) for name, call in calls.items()}
            for _ in range(after):
                await asyncio.sleep(0)
            for name, call in running.items():
                if ends in (name, "both"):
                    call.cancel()
            await asyncio.sleep(0)
            for call in running.values():
                call.cancel()
        await world.at_rest()


async def _hold_if_wanted(world: World) -> None:
    with suppress(PreconditionError):  # TURN_RUNNING, if the leg has ended
        await world.hold()


async def _decode_if_prepared(world: World) -> None:
    with suppress(PreconditionError):  # NOT_PREPARED, if the body was given up
        await world.decode()
