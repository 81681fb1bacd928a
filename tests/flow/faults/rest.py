"""What must be true when nothing runs any more."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from kvloop.kvmeta.v1 import ledger_pb2
from tests.flow.faults.world import LEASE_SECONDS, World
from tests.flow.sim.engines import MODEL

_ROUNDS = 3
_RENEWED = "renewed"
_ROUND_SECONDS = 25.0
"""A lease is renewed at a third; one that is not is over after all rounds."""


async def assert_at_rest(world: World) -> None:
    """Nothing is in flight, and what is retained has an owner, even after a lease.

    One conversation is retained: by one decode engine and by the ledger. Pins that
    a fault left behind have fallen by then, and the one that is wanted has not.
    """
    await eventually(lambda: _in_flight(world), {})
    for _ in range(_ROUNDS):
        await world.clock.advance(_ROUND_SECONDS)
        await eventually(lambda: _leases_a_moment_later(world), [_RENEWED])
    await eventually(lambda: _retained(world), {"pins": 1, "orphans": 0, "used": 0})
    (pin,) = await world.pins()
    assert pin.conversation.state == ledger_pb2.Conversation.STATE_AVAILABLE
    assert len((await world.workers[pin.conversation.worker_id].state())["pins"]) == 1


async def assert_released(world: World, conversation: str) -> None:
    """End a conversation: no engine has a block in use, and no sidecar knows of one."""
    assert (await world.client.end_conversation(conversation, model=MODEL)).released
    await eventually(lambda: _retained(world), {"pins": 0, "orphans": 0, "used": 0})
    assert await world.pins() == []


async def eventually(
    look: Callable[[], Awaitable[object]], wanted: object, seconds: float = 40.0
) -> None:
    """Look until one sees what is wanted; fail with what is seen after so long."""
    seen: object = None
    try:
        async with asyncio.timeout(seconds):
            while (seen := await look()) != wanted:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"{seen} is not {wanted} after {seconds:.0f} s") from None


async def _in_flight(world: World) -> dict[str, Any]:
    """Everything that runs, by where."""
    router = world.router.service
    found: dict[str, Any] = {"turns": router.admission.running + router.admission.waiting}
    for worker_id, known in router.pool.all().items():
        found[f"{worker_id} calls"] = known.in_flight
    for worker_id, worker in world.workers.items():
        found[f"{worker_id} legs"] = worker.sample("legs_in_flight")
        state = await worker.state()
        for phase in ("running", "loading", "waiting"):
            found[f"{worker_id} {phase}"] = len(state[phase])
    return {where: count for where, count in found.items() if count}


async def _leases_a_moment_later(world: World) -> list[str]:
    """A loop that reads the clock before a jump and sleeps after it sleeps too long.

    What wakes up then takes its time on a busy machine, and the lease must not be over
    before that.
    """
    await world.clock.advance(0.1)
    return await _leases(world)


async def _leases(world: World) -> list[str]:
    """How the leases of retained turns stand."""
    states = [await worker.state() for worker in world.of_role("decode")]
    left = [pin["expires_in_seconds"] for state in states for pin in state["pins"]]
    return [_RENEWED for seconds in left if seconds > 0.8 * LEASE_SECONDS] or [
        f"{seconds:.0f} s left" for seconds in left
    ]


async def _retained(world: World) -> dict[str, float]:
    """Pins, those without an owner, and blocks in use for anything else."""
    found = {"pins": 0.0, "orphans": 0.0, "used": 0.0}
    for worker in world.workers.values():
        state = await worker.state()
        held = len(state["pins"])
        found["pins"] += held
        found["used"] += state["blocks"]["used"] - state["blocks"]["pinned"]
        if worker.worker_id.startswith("prefill"):
            found["orphans"] += held
        else:
            found["orphans"] += worker.sample("orphan_pins")
            found["orphans"] += abs(worker.sample("retained_pins") - held)
    return found
