"""Whatever ends the wish for retained KV, decode has its blocks back within 2 s."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from kvloop.common.v1 import common_pb2
from kvloop.kvmeta.v1 import ledger_pb2
from tests.flow.leases.world import World, eventually, generate, key, world
from tests.flow.sim.engines import MODEL, prompt

EVENT_SECONDS = 4.0
"""How long the sidecar waits for the engine's word that a turn has ended."""


@pytest.fixture(params=["0.32.0", "0.21.0"], ids=["renewable", "fixed"])
async def stack(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    """Engines that renew leases, and engines that keep blocks for 480 s."""
    waits = {"event_timeout_seconds": EVENT_SECONDS}
    async with world(tmp_path, sim={"vllm_version": request.param}, sidecar=waits) as built:
        yield built


async def test_an_ended_conversation_is_freed(stack: World) -> None:
    await stack.first_turn("c")
    assert (await stack.client.end_conversation("c", model=MODEL)).released
    await stack.freed()
    assert stack.sample("releases_total", cause="ended") == 1


async def test_a_superseded_turn_is_freed(stack: World) -> None:
    await stack.first_turn("c")
    (pin,) = (await stack.decode.state())["pins"]
    (held,) = (await stack.ledger.ListPins(ledger_pb2.ListPinsRequest())).pins
    engine = stack.decode.host.identity
    assert engine is not None
    await stack.ledger.CommitTurn(
        ledger_pb2.CommitTurnRequest(
            key=key("c"),
            request_id="newer",
            turn=held.conversation.turn + 1,
            worker_id="decode-0",
            engine=common_pb2.EngineRef(engine_id=engine.engine_id, epoch=engine.epoch),
            transfer_params_json=b'{"remote_request_id":"elsewhere"}',
            engine_ttl=Duration(seconds=60),
        )
    )
    await stack.freed()
    assert pin["turn_id"] != "newer"
    assert stack.sample("releases_total", cause="superseded") == 1


@pytest.mark.parametrize(
    ("edit", "miss_reason"),
    [
        (lambda history: [history[0] ^ 1, *history[1:], 7], "PREFIX_MISMATCH"),
        (lambda history: history[:200], "CACHED"),
    ],
    ids=["mismatch", "cached on prefill"],
)
async def test_a_miss_of_the_next_turn_frees_what_it_could_not_use(
    stack: World, edit: Any, miss_reason: str
) -> None:
    history = await stack.first_turn("c")
    (before,) = (await stack.decode.state())["pins"]
    done = await stack.turn(edit(history), "c")
    assert done.receipt.miss_reason == miss_reason
    await eventually(lambda: stack.sample("retained_pins") == 1, seconds=2)
    (after,) = (await stack.decode.state())["pins"]
    assert after["request_id"] != before["request_id"]


async def test_a_hit_frees_what_it_has_read(stack: World) -> None:
    history = await stack.first_turn("c")
    await stack.prefill.post("/reset_prefix_cache")
    done = await stack.turn([*history, 7], "c")
    assert done.receipt.pulled_tokens > 400
    await eventually(lambda: stack.sample("retained_pins") == 1, seconds=2)


async def test_a_conversation_that_has_had_its_time_is_freed(stack: World) -> None:
    await stack.first_turn("c")
    await stack.ledger.ExtendConversation(
        ledger_pb2.ExtendConversationRequest(key=key("c"), ttl=Duration(nanos=200_000_000))
    )
    await stack.freed(seconds=2.5)
    assert stack.sample("releases_total", cause="expired") == 1


async def test_an_evicted_turn_is_freed_even_if_its_sidecar_did_not_ask(stack: World) -> None:
    await stack.first_turn("c")
    (pin,) = (await stack.decode.state())["pins"]
    engine = stack.decode.host.identity
    assert engine is not None
    evicted = await stack.ledger.EvictHandles(
        ledger_pb2.EvictHandlesRequest(
            worker_id="decode-0",
            engine=common_pb2.EngineRef(engine_id=engine.engine_id, epoch=engine.epoch),
            turn_ids=[pin["turn_id"]],
        )
    )
    assert list(evicted.evicted_turn_ids) == [pin["turn_id"]]
    await stack.freed()
    assert stack.sample("releases_total", cause="budget") == 1


async def test_a_turn_that_the_ledger_surely_did_not_get_is_freed(stack: World) -> None:
    await stack.kvmeta.aclose()
    done = await generate(stack.client, prompt(500), "c")
    assert done.receipt.retain_outcome == "LEDGER_UNAVAILABLE"
    await stack.freed()
    assert stack.sample("releases_total", cause="not_stored") == 1


async def test_a_turn_whose_client_leaves_is_freed(stack: World) -> None:
    answer = stack.client.generate(
        prompt(500),
        model=MODEL,
        conversation_id="c",
        max_tokens=20_000,
        extra_body={"ignore_eos": True},
    )
    with contextlib.suppress(asyncio.CancelledError):
        async with answer:
            async for _ in answer:
                break
    await stack.freed()


async def test_a_turn_whose_event_comes_when_nobody_waits_any_more_is_freed(stack: World) -> None:
    fault = f"delay_event;seconds={EVENT_SECONDS + 2};leg=decode"
    late = {"vllm_xargs": {"sim_fault": fault}}
    done = await generate(stack.client, prompt(500), "c", **late)
    assert done.receipt.retain_outcome == "NO_EVENT"
    await stack.freed(seconds=4)
    assert stack.sample("releases_total", cause="unknown") == 1


async def test_an_answer_that_ended_at_a_stop_string_is_retained(stack: World) -> None:
    """Engines do not tell it from one whose client has gone; its sidecar does."""
    tokens = prompt(500)
    whole = await generate(stack.client, tokens, "other")
    assert (await stack.client.end_conversation("other", model=MODEL)).released
    await stack.freed()
    stop = whole.text[40:50]
    done = await generate(stack.client, tokens, "c", stop=[stop])
    assert len(done.text) < len(whole.text)
    assert done.receipt.retain_outcome == "RETAINED"
    await stack.prefill.post("/reset_prefix_cache")
    again = await stack.turn([*tokens, *done.token_ids, 7], "c")
    assert again.receipt.pulled_tokens > 400
