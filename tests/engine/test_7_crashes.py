"""kill -9 of any service at any step of a turn: no pin outlives its lease, no token is wrong.

Both engines are real and go on when their sidecars fall. Of each service that is
killed, conversations are at every step of a turn at that moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest
import pytest_asyncio

from kvloop import Completion
from kvloop.errors import KvloopError
from kvloop.kvmeta.v1 import ledger_pb2
from kvloop.receipts import Receipt
from tests.engine.attached_prefill import AttachedPrefill, attached_prefill
from tests.engine.engine_link import REQUEST, EngineLink
from tests.engine.engines import EngineProbe, eventually
from tests.engine.leased import LEASE_SECONDS, LeasedDecode, until_served
from tests.engine.turns import ANSWER, generate
from tests.engine.world import MODEL, World

PREFILL_LEASE_SECONDS = 30
"""vLLM's own, for what decode has not read."""
AVAILABLE = ledger_pb2.Conversation.STATE_AVAILABLE
VICTIMS = ("prefill's sidecar", "decode's sidecar", "kvmeta", "router")
FATAL = ("decode's sidecar", "router")
"""Those without which the turns that they are part of have no answer."""
HELD_STEPS = {
    "after take": ("prefill", REQUEST),
    "after prefill": ("prefill", 0),
    "before decode": ("decode", REQUEST),
    # The engine goes on to its end, and retains a turn that nobody has committed.
    "mid-stream": ("decode", 5),
}
"""Where a turn is held, and how many events of the engine's stream pass before."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def prefill(world: World, decode: LeasedDecode) -> AsyncIterator[AttachedPrefill]:
    """The prefill engine's sidecar. It pulls whatever is proven."""
    async with attached_prefill(world, ["--no-pull-guard"]) as attached:
        yield attached


@dataclass
class Talk:
    """One conversation, as its client has it."""

    world: World
    name: str
    history: list[int] = field(default_factory=list)

    async def turn(self) -> Completion | None:
        """One turn: its answer, which must be right, or None if it failed."""
        self.history += self.world.tokens(200 if not self.history else 10)
        try:
            done = await generate(self.world, self.history, self.name)
        except KvloopError:
            return None
        assert done.token_ids == await self.world.prefill.recompute_prompt(self.history, ANSWER)
        self.history += done.token_ids
        return done

    async def retained_turn(self) -> Completion:
        """One turn, tried again while services find each other after a restart."""
        while True:
            done = await self.turn()
            if done is not None and _took_all_steps(done.receipt):
                return done
            await asyncio.sleep(0.2)


def _took_all_steps(receipt: Receipt) -> bool:
    """Whether ledger, prefill and decode have all had their part in a turn."""
    return (
        receipt.miss_reason != "LEDGER_UNAVAILABLE"
        and receipt.prefill_worker_id != ""
        and receipt.retain_outcome == "RETAINED"
    )


@dataclass(frozen=True)
class Victim:
    """A service to kill."""

    kill: Callable[[], None]
    start: Callable[[], Awaitable[None]]


def _victim(world: World, decode: LeasedDecode, prefill: AttachedPrefill, name: str) -> Victim:
    if name in ("kvmeta", "router"):
        return Victim(lambda: world.stack.kill(name), lambda: world.stack.start(name))
    sidecar = prefill.sidecar if name == "prefill's sidecar" else decode.sidecar
    return Victim(sidecar.kill, sidecar.start)


async def _late_reads(engine: EngineProbe) -> float:
    """Reads of blocks that the engine had freed by then, by its own count."""
    return await engine.counter("vllm:nixl_num_notifications_after_expiry_total")


async def _crash(
    talks: dict[str, Talk], links: dict[str, EngineLink], decode: EngineProbe, victim: Victim
) -> set[str]:
    """Kill a service while turns are at all steps, and start it again.

    Returns:
        The steps at which the turn had no answer in the end.
    """
    await talks["after commit"].retained_turn()
    running: dict[str, asyncio.Task[Completion | None]] = {}
    async with asyncio.TaskGroup() as turns:
        with ExitStack() as held:
            ended = await decode.counter("vllm:request_success_total")
            for step, (role, events) in HELD_STEPS.items():
                hold = held.enter_context(links[role].hold(events))
                running[step] = turns.create_task(talks[step].turn(), name=step)
                await hold.reached()

            async def answered() -> bool:
                return await decode.counter("vllm:request_success_total") > ended

            await eventually(answered, "the engine has ended the turn that is held mid-stream")
            victim.kill()
        running["before take"] = turns.create_task(talks["before take"].turn())
    await victim.start()
    return {step for step, turn in running.items() if turn.result() is None}


@pytest.mark.parametrize("name", VICTIMS)
async def test_a_service_killed_at_every_step_leaves_no_pin_and_no_wrong_token(
    world: World, decode: LeasedDecode, prefill: AttachedPrefill, name: str
) -> None:
    await decode.let_all_go()
    late = [await _late_reads(engine) for engine in (world.prefill, decode.probe)]
    talks = {
        step: Talk(world, world.conversation())
        for step in ("before take", *HELD_STEPS, "after commit")
    }
    async with asyncio.TaskGroup() as first:
        for talk in talks.values():
            first.create_task(talk.retained_turn())

    links = {"prefill": prefill.link, "decode": decode.link}
    failed = await _crash(talks, links, decode.probe, _victim(world, decode, prefill, name))
    assert failed == (set(talks) - {"after commit"} if name in FATAL else set())
    await until_served(world)

    # Whatever became of the turns, their clients go on: right answers, and reuse.
    async with asyncio.TaskGroup() as next_turns:
        for talk in talks.values():
            next_turns.create_task(talk.retained_turn())
    for talk in talks.values():
        done = await talk.retained_turn()
        assert done.receipt.pulled_tokens > 0, talk.name

    async def only_what_is_owned() -> bool:
        info, owned = await decode.sidecar.info(), await decode.owned()
        names = {pin.conversation.key.conversation_id for pin in owned}
        assert names <= {talk.name for talk in talks.values()}
        return (
            info.orphan_pins == 0
            and info.retained_pins == len(owned) == len(talks)
            and all(pin.conversation.state == AVAILABLE for pin in owned)
            and info.retained_blocks == await decode.blocks()
        )

    await eventually(only_what_is_owned, "what a crash left has fallen", LEASE_SECONDS + 5)
    for talk in talks.values():
        assert (await world.client.end_conversation(talk.name, model=MODEL)).released
    await decode.down_to(0, "decode has every block back")

    async def prefill_is_empty() -> bool:
        return await world.prefill.kv_usage() == 0

    await eventually(prefill_is_empty, "prefill has every block back", PREFILL_LEASE_SECONDS + 5)
    assert late == [await _late_reads(engine) for engine in (world.prefill, decode.probe)]
