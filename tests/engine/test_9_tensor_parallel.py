"""A decode engine of two ranks: what is released is freed on both."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tests.engine.leased import LeasedDecode, leased_decode
from tests.engine.turns import first_turn
from tests.engine.world import MODEL, World


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def ranks(
    world: World, decode: LeasedDecode, model_directory: Path
) -> AsyncIterator[LeasedDecode]:
    """The engine, in the place of the one with a single rank."""
    await decode.sidecar.stop()
    two = "--tensor-parallel-size 2"
    async with leased_decode(world, model_directory, "decode-ranks", two) as both:
        yield both


async def test_a_turn_is_released_on_both_ranks_within_2_s(
    world: World, ranks: LeasedDecode
) -> None:
    before = await ranks.blocks()
    conversation = world.conversation()
    await first_turn(world, conversation, 2000)
    await ranks.up_to(before + 2000 // 32, "a turn is retained")
    assert (await world.client.end_conversation(conversation, model=MODEL)).released
    await ranks.down_to(before, "its blocks are freed")
