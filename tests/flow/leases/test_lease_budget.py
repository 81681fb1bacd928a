"""Retained KV takes its share of decode's memory and no more, and never makes work wait."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from kvloop.kvmeta.v1 import ledger_pb2
from tests.flow.held_up import held_up
from tests.flow.leases.world import World, eventually, generate, world
from tests.flow.sim.engines import prompt

BLOCKS = 200
TURN_BLOCKS = 34  # of a turn of 500 tokens and its answer, at 16 tokens a block


def _small(**sidecar: Any) -> dict[str, Any]:
    return {
        "decode": {"num_kv_blocks": BLOCKS, "max_model_len": 2048},
        "sidecar": {"free_blocks_share": 0.0, "retention_policy": "lru", **sidecar},
    }


async def _owners(stack: World) -> list[str]:
    pins = (await stack.ledger.ListPins(ledger_pb2.ListPinsRequest())).pins
    return [pin.conversation.key.conversation_id for pin in pins]


async def test_retained_kv_stays_within_its_share_and_the_newest_stay(tmp_path: Path) -> None:
    async with world(tmp_path, **_small(retained_blocks_share=0.5)) as stack:
        for number in range(6):
            await stack.first_turn(f"c{number}", seed=number)
            state = await stack.decode.until(lambda state: state["blocks"]["pinned"] <= BLOCKS // 2)
        assert len(state["pins"]) == BLOCKS // 2 // TURN_BLOCKS
        assert sorted(await _owners(stack)) == ["c4", "c5"]
        assert stack.sample("evictions_total", reason="budget") == 4


async def test_the_next_turn_of_an_evicted_conversation_says_so_and_is_right(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, **_small(retained_blocks_share=0.2)) as stack:
        history = await stack.first_turn("a")
        await stack.first_turn("b", seed=1)
        await eventually(lambda: stack.sample("evictions_total", reason="budget") == 1)
        done = await stack.turn([*history, 7], "a")
        assert done.receipt.miss_reason == "EVICTED"


async def test_new_work_never_waits_for_retained_kv(tmp_path: Path) -> None:
    """All of the memory may be retained here, and none is kept free: the worst case."""
    async with world(tmp_path, **_small(retained_blocks_share=1.0)) as stack:
        for number in range(5):
            await stack.first_turn(f"c{number}", seed=number)
        assert (await stack.decode.state())["blocks"]["free"] < 2 * TURN_BLOCKS
        began = time.monotonic()
        right = await stack.right(prompt(1500, seed=9))
        alone = time.monotonic() - began  # which is longer on a machine that is busy
        async with held_up() as counted:
            began = time.monotonic()
            done = await generate(stack.client, prompt(1500, seed=9), "large")
            took = time.monotonic() - began
        assert took - counted.seconds < 2.0 + 10 * alone
        assert list(done.token_ids) == right
        assert (stack.sample("evictions_total", reason="pressure") or 0) >= 1
        assert "c0" not in await _owners(stack)


async def test_a_share_is_kept_free_before_anyone_needs_it(tmp_path: Path) -> None:
    shares = {"retained_blocks_share": 1.0, "free_blocks_share": 0.5}
    async with world(tmp_path, **_small(**shares)) as stack:
        for number in range(4):
            await stack.first_turn(f"c{number}", seed=number)
        # Blocks are looked at while decode works: here for good.
        working = asyncio.ensure_future(
            generate(
                stack.client,
                prompt(64, seed=9),
                "working",
                vllm_xargs={"sim_fault": "stall;after_tokens=5;leg=decode"},
            )
        )
        await eventually(lambda: stack.sample("evictions_total", reason="low"))
        await stack.decode.until(lambda state: state["blocks"]["free"] >= BLOCKS // 2)
        assert not working.done()
        working.cancel()
        await asyncio.wait([working])


async def test_many_conversations_and_little_memory_give_right_answers_only(
    tmp_path: Path,
) -> None:
    """Eviction, pressure and reuse at once: whatever is pulled is what was meant."""
    async with world(tmp_path, **_small(retained_blocks_share=0.8)) as stack:
        histories = {f"c{number}": prompt(300, seed=number) for number in range(8)}

        async def converse(name: str) -> None:
            for turn in range(4):
                done = await stack.turn(histories[name], name)
                histories[name] += [*done.token_ids, 5 + turn]

        async with asyncio.TaskGroup() as tasks:
            for name in histories:
                tasks.create_task(converse(name), name=name)
        assert (await stack.decode.metric("vllm:nixl_num_notifications_after_expiry_total")) == 0
        assert stack.sample("orphan_pins") == 0
