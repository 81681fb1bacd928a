"""Sidecars as a user starts them, on real engines: pulls are guarded, and retained KV has
its horizon."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest_asyncio

from kvloop import Completion
from kvloop.receipts import Receipt
from kvloop.stack.ports import LOOPBACK, PortPool
from tests.engine.attached_prefill import AttachedPrefill, attached_prefill
from tests.engine.engines import EngineProbe
from tests.engine.leased import PATIENT, LeasedDecode
from tests.engine.slow_engine import halted_workers
from tests.engine.turns import ANSWER, first_turn, generate
from tests.engine.world import World

HALT_SECONDS = 4.0
"""Much longer than computing a prompt takes."""
SLOW_TURNS = 3
"""At most, before pulls are held back."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def metrics_address() -> AsyncIterator[str]:
    """Where prefill's sidecar serves its metrics."""
    with PortPool() as ports:
        yield f"{LOOPBACK}:{ports.take(9350)}"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def prefill(
    world: World, decode: LeasedDecode, metrics_address: str
) -> AsyncIterator[AttachedPrefill]:
    """Both sidecars with the flags' defaults."""
    decode.sidecar.kill()
    await decode.sidecar.start(args=PATIENT)
    args = [f"--metrics-listen={metrics_address}"]
    async with attached_prefill(world, args) as attached:
        yield attached


async def _next_turn(
    world: World, conversation: str, history: list[int]
) -> tuple[Completion, list[int]]:
    """A turn, which must be right, and what the next one starts from."""
    prompt = [*history, *world.tokens(20)]
    pulled = await world.prefill.pulled_tokens()
    done = await generate(world, prompt, conversation)
    assert done.receipt.proven_tokens == len(history) - 1
    assert done.receipt.pulled_tokens == await world.prefill.pulled_tokens() - pulled
    assert done.token_ids == await world.prefill.recompute_prompt(prompt, ANSWER)
    return done, [*prompt, *done.token_ids]


def _decided_by_its_figures(receipt: Receipt) -> None:
    """Whichever way it was decided, the receipt says so, and by which figures."""
    pull, compute = receipt.expected_pull_seconds, receipt.expected_recompute_seconds
    wanted = receipt.proven_tokens - receipt.cached_tokens
    assert compute is not None
    if receipt.pulled_tokens == 0:
        assert receipt.miss_reason == "SLOWER_THAN_RECOMPUTE"
        assert pull is None or pull > compute
    else:
        assert receipt.miss_reason is None
        assert receipt.pull_seconds is not None
    if receipt.pulled_tokens == wanted:
        assert pull is None or pull <= compute
    elif receipt.pulled_tokens:  # a probe
        assert pull is None or pull > compute
        assert receipt.pulled_tokens <= 512


async def test_turns_are_exact_and_their_receipts_and_metrics_say_what_was_decided(
    world: World, prefill: AttachedPrefill, metrics_address: str
) -> None:
    conversation = world.conversation()
    history = await first_turn(world, conversation)
    receipts = []
    for _ in range(4):
        await world.prefill.forget_prefixes()
        done, history = await _next_turn(world, conversation, history)
        _decided_by_its_figures(done.receipt)
        receipts.append(done.receipt)
    async with aiohttp.ClientSession() as session:
        sidecar = EngineProbe(f"http://{metrics_address}", session, "")
        held_back = {
            offered: await sidecar.counter("kvloop_worker_pulls_held_back_total", offered=offered)
            for offered in ("none", "probe")
        }
    assert held_back == {
        "none": sum(not receipt.pulled_tokens for receipt in receipts),
        "probe": sum(
            0 < receipt.pulled_tokens < receipt.proven_tokens - receipt.cached_tokens
            for receipt in receipts
        ),
    }
    (link,) = (await prefill.sidecar.info()).links
    # A pull that shows an older one to have been slow by chance takes its place.
    assert 1 <= link.samples <= sum(receipt.pulled_tokens > 0 for receipt in receipts)


async def test_a_link_that_is_slow_is_given_up_after_three_turns_and_answers_stay_exact(
    world: World, decode: LeasedDecode, prefill: AttachedPrefill
) -> None:
    prefill.sidecar.kill()  # what it has measured so far goes with it
    await prefill.sidecar.start()
    conversation = world.conversation()
    history = await first_turn(world, conversation)
    receipts = []
    for _ in range(SLOW_TURNS + 1):
        await world.prefill.forget_prefixes()
        async with asyncio.TaskGroup() as tasks:
            with halted_workers(decode.engine_pid):
                with prefill.link.hold() as hold:
                    turn = tasks.create_task(_next_turn(world, conversation, history))
                    await hold.reached()
                await asyncio.sleep(HALT_SECONDS)  # it is this that makes reading slow
        done, history = turn.result()
        receipts.append(done.receipt)
    *slow, last = receipts
    assert slow[0].pulled_tokens > 0
    for receipt in slow:
        assert not receipt.pulled_tokens or (receipt.pull_seconds or 0) > HALT_SECONDS / 2
    assert last.pulled_tokens == 0
    assert last.miss_reason == "SLOWER_THAN_RECOMPUTE"
    assert last.expected_pull_seconds is not None
    assert last.expected_recompute_seconds is not None
    assert last.expected_pull_seconds > last.expected_recompute_seconds
    (link,) = (await prefill.sidecar.info()).links
    assert link.held_back
