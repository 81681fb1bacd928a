"""Simulated pins are leases, and the sidecar hears of everything that becomes of them."""

from __future__ import annotations

from typing import Any

import pytest

from services.sim.core import EngineCore
from services.sim.events import hello
from services.sim.latency import PROFILES, Preset
from services.sim.sequence import Phase
from tests.unit.sim.lab import Answer, Lab, prompt_of, recomputed

LEASE = 60.0


def _events(lab: Lab, kind: str) -> list[dict[str, Any]]:
    return [event for event in lab.events if event["type"] == kind]


async def _decode_turn(
    lab: Lab, decode: EngineCore, length: int = 200, *, seed: int = 0, turn_id: str = "t"
) -> Answer:
    params = {"kvloop_turn_id": turn_id, "do_remote_prefill": False, "do_remote_decode": False}
    return await lab.ask(decode, prompt_of(length, seed), params=params)


def _engine(lab: Lab, **changes: Any) -> EngineCore:
    return lab.engine(**({"pin_lease_seconds": LEASE} | changes))


async def test_a_turn_is_retained_for_a_lease_and_says_so(lab: Lab) -> None:
    decode = _engine(lab)
    answer = await _decode_turn(lab, decode)
    (event,) = _events(lab, "finished")
    assert event["ttl_seconds"] == LEASE
    assert answer.params["remote_blocks_expiry_time"] == pytest.approx(decode.now() + LEASE, abs=1)
    await lab.clock.advance(LEASE + 1)
    request_id = answer.params["remote_request_id"]
    assert _events(lab, "freed") == [{"type": "freed", "request_ids": [request_id]}]
    assert decode.pool.num_used == 0


async def test_a_renewal_moves_the_deadline_and_is_confirmed(lab: Lab) -> None:
    decode = _engine(lab)
    answer = await _decode_turn(lab, decode)
    request_id = answer.params["remote_request_id"]
    await lab.clock.advance(40)
    decode.renew([(request_id, LEASE), ("unknown", LEASE)])
    decode.renew([(request_id, 10.0)])  # never backwards
    first, second = _events(lab, "renewed")
    for event in (first, second):
        (pin,) = event["pins"]
        assert pin["request_id"] == request_id
        assert pin["remaining_seconds"] == pytest.approx(LEASE, abs=1)
        assert pin["extension_seconds"] == pytest.approx(40, abs=1)
    (held,) = decode.snapshot()["pins"]
    assert (held["turn_id"], held["num_tokens"], held["num_blocks"]) == ("t", 207, 13)
    assert held["extension_seconds"] == pytest.approx(40, abs=1)
    assert held["age_seconds"] == pytest.approx(40, abs=1)
    await lab.clock.advance(50)
    assert _events(lab, "freed") == []
    await lab.clock.advance(11)
    assert len(_events(lab, "freed")) == 1


async def test_a_deadline_that_is_nearly_there_is_not_moved(lab: Lab) -> None:
    decode = _engine(lab)
    answer = await _decode_turn(lab, decode)
    await lab.clock.advance(LEASE - 1)
    decode.renew([(answer.params["remote_request_id"], LEASE)])
    assert _events(lab, "renewed") == []


async def test_a_prefill_engine_sees_the_renewed_deadline_and_only_then_pulls(lab: Lab) -> None:
    decode = _engine(lab)
    answer = await _decode_turn(lab, decode, 500)
    handle = answer.params
    prompt = [*prompt_of(500), *answer.tokens, 7]
    await lab.clock.advance(50)
    decode.renew([(handle["remote_request_id"], LEASE)])
    ((renewed,),) = (event["pins"] for event in _events(lab, "renewed"))
    await lab.clock.advance(40)  # past the deadline in the handle

    extended = handle | {"kvloop_deadline_extension": renewed["extension_seconds"]}
    handed, second = await lab.turn(_engine(lab), decode, prompt, handle=extended)
    assert handed.params["kvloop_report"]["pulled_tokens"] == 507
    assert second.tokens == await recomputed(lab, prompt)
    assert _events(lab, "freed")[0]["request_ids"] == [handle["remote_request_id"]]


async def test_without_the_extension_a_prefill_engine_declines(lab: Lab) -> None:
    decode = _engine(lab)
    answer = await _decode_turn(lab, decode, 500)
    await lab.clock.advance(50)
    decode.renew([(answer.params["remote_request_id"], LEASE)])
    await lab.clock.advance(40)
    prompt = [*prompt_of(500), *answer.tokens, 7]
    handed, second = await lab.turn(_engine(lab), decode, prompt, handle=answer.params)
    assert handed.params["kvloop_report"]["miss_reason"] == "ENGINE_EXPIRED"
    assert second.tokens == await recomputed(lab, prompt)


@pytest.mark.parametrize(
    ("version", "stock", "lease"),
    [
        ((0, 32, 0), False, 60.0),
        ((0, 29), False, 60.0),
        ((0, 25, 1), False, 0.0),
        ((0, 32), True, 0),
    ],
)
async def test_renewals_are_offered_where_vllm_checks_deadlines(
    lab: Lab, version: tuple[int, ...], stock: bool, lease: float
) -> None:
    engine = _engine(lab, vllm_version=version, stock=stock)
    said = hello(engine.spec, engine.identity)
    assert (said["lease_renewal"], said["pin_lease_seconds"]) == (lease > 0, lease)
    assert said["decoder_kv_blocks_ttl"] == 480
    assert said["kv_block_bytes"] > 0


async def test_a_lease_is_never_longer_than_the_ttl(lab: Lab) -> None:
    engine = _engine(lab, decoder_kv_blocks_ttl_seconds=30.0)
    assert hello(engine.spec, engine.identity)["pin_lease_seconds"] == 30


async def test_pins_of_requests_that_no_sidecar_sent_are_not_spoken_of(lab: Lab) -> None:
    decode = _engine(lab)
    params = {"do_remote_prefill": False, "do_remote_decode": False}
    await lab.ask(decode, prompt_of(200), params=params)
    assert decode.pins.num_blocks() > 0
    assert decode.snapshot()["pins"] == []
    await lab.clock.advance(LEASE + 1)
    assert lab.events == []


async def test_a_request_that_waits_for_retained_blocks_says_how_many(lab: Lab) -> None:
    decode = _engine(lab, num_blocks=40, max_model_len=600)
    answer = await _decode_turn(lab, decode, 500)
    waiting = lab.sequence(decode, prompt_of(300, seed=5))
    decode.submit(waiting)
    await lab.clock.advance(1)
    pressure = _events(lab, "pressure")
    assert 10 <= len(pressure) <= 21  # at most one per 50 ms
    assert {event["blocks_needed"] for event in pressure} == {12}

    decode.release([answer.params["remote_request_id"]])
    await lab.clock.advance(1)
    assert waiting.phase is Phase.ENDED
    assert _events(lab, "pressure") == pressure


async def test_a_request_that_waits_for_others_alone_presses_nobody(lab: Lab) -> None:
    decode = _engine(lab, num_blocks=40, max_model_len=600)
    for seed in (1, 2):
        decode.submit(lab.sequence(decode, prompt_of(400, seed), max_tokens=100))
    await lab.clock.advance(1)
    assert _events(lab, "pressure") == []


@pytest.mark.parametrize("has_sidecar", [True, False])
async def test_an_answer_that_was_broken_off_is_retained_until_the_sidecar_decides(
    lab: Lab, has_sidecar: bool
) -> None:
    """As at a stop string, which vLLM's front end finds, not its engine."""
    decode = _engine(lab, has_sidecar=has_sidecar, profile=PROFILES[Preset.TINY_CPU])
    params = {"kvloop_turn_id": "t", "do_remote_prefill": False, "do_remote_decode": False}
    sequence = lab.sequence(decode, prompt_of(200), max_tokens=1000, params=params)
    decode.submit(sequence)
    while sequence.answer_tokens < 5:
        await lab.clock.advance(0.01)
    decode.abort(sequence)
    (event,) = _events(lab, "finished")
    assert event["retained"] is has_sidecar
    assert len(decode.pins.all(decode.now())) == has_sidecar


async def test_a_turn_that_was_broken_off_before_its_answer_leaves_nothing(lab: Lab) -> None:
    decode = _engine(lab)
    params = {"kvloop_turn_id": "t", "do_remote_prefill": False, "do_remote_decode": False}
    sequence = lab.sequence(decode, prompt_of(200), params=params)
    decode.submit(sequence)
    decode.abort(sequence)
    (event,) = _events(lab, "finished")
    assert not event["retained"]
    assert decode.pool.num_used == 0
