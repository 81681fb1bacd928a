"""How long things take: prefill, decode steps, transfers. Pure functions.

A step of the engine runs all decoding sequences by one token and computes a part
of the prompts that wait, as vLLM's scheduler does. Its time is

    max(weights, prompt tokens · linear + prompt tokens · context · attention)
      + decoding sequences · each + tokens of context they attend to · each

and a transfer takes

    latency + descriptors · each + bytes / bandwidth

Presets are fitted to measurements; docs/sim-engine.md shows how well they fit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum


@dataclass(frozen=True)
class Profile:
    """The speed of one model on one machine. All times in seconds."""

    request_seconds: float
    """HTTP server and scheduling, per request."""
    prompt_token_seconds: float
    """Tokenizing and carrying the prompt, per token of it."""
    prefill_token_seconds: float
    """Computing a prompt token, attention aside."""
    prefill_pair_seconds: float
    """Attention of a prompt token to one token before it."""
    step_seconds: float
    """The shortest step: reading the weights."""
    step_sequence_seconds: float
    """Each decoding sequence in the step."""
    step_context_token_seconds: float
    """Each token of context that decoding sequences attend to."""
    handshake_seconds: float
    """First contact with another engine."""
    transfer_seconds: float
    """Any transfer, whatever its size."""
    descriptor_seconds: float
    """Each descriptor of a transfer. NIXL needs one for K and one for V per block
    and layer, unless blocks hold all layers."""
    bytes_per_second: float
    """Bandwidth of the link; 0: infinite."""
    descriptors_per_block: int
    kv_bytes_per_token: int
    kv_capacity_tokens: int
    """Tokens that the KV cache holds."""

    def request_overhead(self, prompt_tokens: int) -> float:
        """Time of a request outside of the engine's steps."""
        return self.request_seconds + prompt_tokens * self.prompt_token_seconds

    def step(self, prefills: Iterable[tuple[int, int]], decode_contexts: Iterable[int]) -> float:
        """Time of one step.

        Args:
            prefills: (tokens computed, tokens before them) per prompt.
            decode_contexts: tokens of context per decoding sequence.
        """
        prefill = 0.0
        for tokens, before in prefills:
            pairs = tokens * (before + tokens / 2)
            prefill += tokens * self.prefill_token_seconds + pairs * self.prefill_pair_seconds
        sequences = context = 0
        for tokens in decode_contexts:
            sequences += 1
            context += tokens
        return (
            max(self.step_seconds, prefill)
            + sequences * self.step_sequence_seconds
            + context * self.step_context_token_seconds
        )

    def transfer(self, blocks: int, block_size: int) -> float:
        """Time to read blocks from another engine."""
        seconds = (
            self.transfer_seconds + blocks * self.descriptors_per_block * self.descriptor_seconds
        )
        if self.bytes_per_second:
            seconds += self.transfer_bytes(blocks, block_size) / self.bytes_per_second
        return seconds

    def transfer_bytes(self, blocks: int, block_size: int) -> int:
        """Bytes read for that many blocks."""
        return blocks * block_size * self.kv_bytes_per_token


class Preset(StrEnum):
    """A profile by name."""

    INSTANT = "instant"
    TINY_CPU = "tiny-cpu"
    QWEN3_32B_H200 = "qwen3-32b-h200"
    QWEN3_32B_H200_SLOW_LINK = "qwen3-32b-h200-slow-link"


_QWEN3_32B_H200 = Profile(
    request_seconds=0.015,
    prompt_token_seconds=1.35e-6,
    prefill_token_seconds=98e-6,
    prefill_pair_seconds=3.13e-9,
    step_seconds=0.016,
    step_sequence_seconds=60e-6,
    step_context_token_seconds=65e-9,
    handshake_seconds=0.05,
    transfer_seconds=0.001,
    descriptor_seconds=3.4e-6,
    bytes_per_second=394e9,
    descriptors_per_block=64 * 2,
    kv_bytes_per_token=64 * 2 * 8 * 128 * 2,
    kv_capacity_tokens=163_840,
)

PROFILES: dict[Preset, Profile] = {
    Preset.INSTANT: Profile(
        request_seconds=0,
        prompt_token_seconds=0,
        prefill_token_seconds=0,
        prefill_pair_seconds=0,
        step_seconds=0,
        step_sequence_seconds=0,
        step_context_token_seconds=0,
        handshake_seconds=0,
        transfer_seconds=0,
        descriptor_seconds=0,
        bytes_per_second=0,
        descriptors_per_block=8,
        kv_bytes_per_token=4096,
        kv_capacity_tokens=262_144,
    ),
    Preset.TINY_CPU: Profile(
        request_seconds=0.015,
        prompt_token_seconds=5e-6,
        prefill_token_seconds=290e-6,
        prefill_pair_seconds=2e-9,
        step_seconds=0.0125,
        step_sequence_seconds=0.002,
        step_context_token_seconds=0.2e-6,
        handshake_seconds=0.05,
        transfer_seconds=0.06,
        descriptor_seconds=50e-6,
        bytes_per_second=0.4e9,
        descriptors_per_block=4 * 2,
        kv_bytes_per_token=4 * 2 * 2 * 64 * 4,
        kv_capacity_tokens=262_144,
    ),
    Preset.QWEN3_32B_H200: _QWEN3_32B_H200,
    Preset.QWEN3_32B_H200_SLOW_LINK: replace(_QWEN3_32B_H200, bytes_per_second=0.4e9),
}
