"""How long things take, and how well the presets meet what was measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.sim.latency import PROFILES, Preset, Profile
from services.sim.sequence import Sampling
from tests.unit.sim.lab import FIRST_PREFILL, Lab, finish

_FAST = PROFILES[Preset.INSTANT]


def test_a_step_costs_at_least_the_weights() -> None:
    profile = replace(_FAST, step_seconds=0.016, prefill_token_seconds=0.001)
    assert profile.step([(4, 0)], []) == 0.016
    assert profile.step([(100, 0)], []) == pytest.approx(0.1)
    assert profile.step([(100, 0)], [10, 10]) == pytest.approx(0.1)


def test_decoding_costs_grow_with_the_batch_and_its_context() -> None:
    profile = replace(
        _FAST, step_seconds=0.01, step_sequence_seconds=0.001, step_context_token_seconds=1e-6
    )
    assert profile.step([], [1000]) == pytest.approx(0.012)
    assert profile.step([], [1000] * 10) == pytest.approx(0.03)


def test_attention_makes_long_prompts_quadratic() -> None:
    profile = replace(_FAST, prefill_pair_seconds=2e-6)
    assert profile.step([(1000, 0)], []) == pytest.approx(1.0)
    assert profile.step([(2000, 0)], []) == pytest.approx(4.0)
    # The same prompt in two steps takes the same time.
    assert profile.step([(1000, 0)], []) + profile.step([(1000, 1000)], []) == pytest.approx(4.0)


def test_a_transfer_pays_for_descriptors_and_for_bytes() -> None:
    profile = replace(
        _FAST,
        transfer_seconds=0.001,
        descriptor_seconds=1e-6,
        descriptors_per_block=128,
        bytes_per_second=1e9,
        kv_bytes_per_token=1000,
    )
    assert profile.transfer(100, 16) == pytest.approx(0.001 + 0.0128 + 0.0016)
    assert profile.transfer(0, 16) == 0.001


def test_the_instant_preset_takes_no_time_at_all() -> None:
    assert _FAST.step([(100_000, 100_000)], [1_000] * 100) == 0
    assert _FAST.transfer(100_000, 16) == 0
    assert _FAST.request_overhead(100_000) == 0


_CROSS_LAYER = {"descriptors_per_block": 1}
_MEASURED = [
    # block size, changes, context, standard TTFT, bi-directional TTFT in ms
    pytest.param(16, {}, 8_192, 1020, 368, id="block 16, 8k"),
    pytest.param(16, {}, 24_576, 3607, 932, id="block 16, 24k"),
    pytest.param(128, {}, 8_192, 1006, 135, id="block 128, 8k"),
    pytest.param(128, {}, 24_576, 3510, 251, id="block 128, 24k"),
    pytest.param(128, {}, 40_960, 6857, 387, id="block 128, 40k"),
    pytest.param(16, _CROSS_LAYER, 8_192, 1014, 107, id="cross-layer, 8k"),
    pytest.param(16, _CROSS_LAYER, 24_576, 3601, 184, id="cross-layer, 24k"),
    pytest.param(16, _CROSS_LAYER, 40_960, 7053, 249, id="cross-layer, 40k"),
]
"""docs/sim-engine.md repeats this table."""


@pytest.mark.parametrize(("block_size", "changes", "context", "standard", "pulled"), _MEASURED)
async def test_second_turns_take_as_long_as_measured_on_h200(
    lab: Lab, block_size: int, changes: dict[str, Any], context: int, standard: float, pulled: float
) -> None:
    """One conversation, prefill's cache cold, decode's warm, 200 new tokens."""
    # The measured engines had met before.
    profile = replace(PROFILES[Preset.QWEN3_32B_H200], handshake_seconds=0, **changes)
    common: dict[str, Any] = {
        "profile": profile,
        "block_size": block_size,
        "num_blocks": profile.kv_capacity_tokens // block_size,
        "max_model_len": 65_536,
        "max_num_batched_tokens": 8192,
    }
    decode = lab.engine(**common)
    prompt = [1000 + index % 1500 for index in range(context)]
    _, first = await lab.turn(lab.engine(**common), decode, prompt, max_tokens=16)
    history = [*prompt, *first.tokens, *range(2000, 2200)]
    for handle, measured in ((FIRST_PREFILL, standard), (first.params, pulled)):
        seconds = await _ttft(lab, profile, lab.engine(**common), decode, history, handle)
        assert seconds * 1000 == pytest.approx(measured, rel=0.12)


async def _ttft(lab: Lab, profile: Profile, prefill, decode, history, handle) -> float:
    """From the router's call to prefill until decode's first token."""
    start = lab.clock.monotonic()
    await lab.clock.sleep_for(profile.request_overhead(len(history)))
    handed = await lab.ask(prefill, history, max_tokens=1, params=handle)
    await lab.clock.sleep_for(profile.request_overhead(len(history)))
    sequence = lab.sequence(decode, history, params=handed.params, sampling=Sampling(max_tokens=2))
    decode.submit(sequence)
    await lab.clock.run(finish(sequence))
    assert sequence.first_token_at is not None
    return sequence.first_token_at - start


async def test_a_slow_link_makes_pulling_slower_than_computing(lab: Lab) -> None:
    fast, slow = (
        PROFILES[preset] for preset in (Preset.QWEN3_32B_H200, Preset.QWEN3_32B_H200_SLOW_LINK)
    )
    tokens = 24_576
    assert fast.transfer(tokens // 16, 16) < fast.step([(tokens, 0)], [])
    ratio = slow.transfer(tokens // 128, 128) / slow.step([(tokens, 0)], [])
    assert 4 < ratio < 9


async def test_the_cpu_preset_is_as_fast_as_the_tiny_model_was(lab: Lab) -> None:
    profile = PROFILES[Preset.TINY_CPU]
    prefill = profile.request_overhead(600) + profile.step([(600, 0)], [])
    decode = sum(profile.step([], [600 + step]) for step in range(40))
    assert prefill == pytest.approx(0.2, rel=0.1)
    assert decode == pytest.approx(0.5, rel=0.25)
    assert 0.06 <= profile.transfer(20, 32) <= 0.09
