"""A short lease costs no reuse: what is wanted is renewed, and pulled from past it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvloop.kvmeta.v1 import ledger_pb2
from tests.flow.leases.world import eventually, world
from tests.flow.sim.engines import MODEL

LEASE = 12


@pytest.mark.timeout(90)
async def test_a_turn_is_reused_long_after_its_lease_and_what_nobody_wants_falls(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, decode={"pin_lease_seconds": LEASE}) as stack:
        history = await stack.first_turn("kept")
        await stack.first_turn("ended", seed=1)
        await stack.first_turn("taken", seed=2)
        await stack.client.end_conversation("ended", model=MODEL)
        await stack.take("taken")  # by someone who will never use it
        await asyncio.sleep(2 * LEASE + 1)

        (pin,) = (await stack.ledger.ListPins(ledger_pb2.ListPinsRequest())).pins
        assert pin.conversation.key.conversation_id == "kept"
        assert 24 <= pin.age.seconds <= 40
        assert pin.engine_remaining.seconds >= LEASE / 2 - 2
        assert pin.num_bytes > 0
        assert (stack.sample("pin_renewals_total") or 0) >= 3
        assert stack.sample("retained_pins") == 1
        assert stack.sample("orphan_pins") == 0

        await stack.prefill.post("/reset_prefix_cache")
        done = await stack.turn([*history, 7], "kept")
        assert done.receipt.pulled_tokens > 400
        assert done.receipt.miss_reason is None


@pytest.mark.timeout(90)
async def test_without_the_ledger_pins_fall_within_a_lease(tmp_path: Path) -> None:
    async with world(tmp_path, decode={"pin_lease_seconds": LEASE}) as stack:
        await stack.first_turn("c")
        await eventually(lambda: (stack.sample("pin_renewals_total") or 0) >= 1)
        await stack.kvmeta.aclose()
        await stack.freed(seconds=LEASE + 3)
        assert (stack.sample("releases_total", cause="expired") or 0) == 0
