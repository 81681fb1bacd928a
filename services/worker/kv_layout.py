"""How the KV cache lies in memory, which decides how fast a pull is. Pure functions.

A pull costs about 3.4 µs per descriptor, whatever its size, and there are
blocks x layers x 2 of them. Blocks of 128 tokens instead of 16 make an eighth of
that, and a layout that keeps all layers of a block together lets NIXL move it in
one piece. Measured on H200 over NVLink with vLLM 0.25.1: 8 GB/s with the engine's
own default, 57 to 64 with blocks of 128, 273 to 351 with cross-layer blocks.

Cross-layer blocks have 64 tokens here instead of the engine's 16: a quarter of the
descriptors, of the hashes that both engines make of a prompt, and of the ids and digests
that a handle carries. A history's last block is pulled as it is, full or not; where a
history was edited, up to 63 tokens before the change are computed again.

Latent attention (MLA) keeps one vector per token and layer: one descriptor for each
block and layer, and small ones. Its backends have no cross-layer blocks, and accept
blocks of 64 on Hopper and Blackwell alike.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Literal

from services.worker.given_flags import GivenFlags

Platform = Literal["cpu", "cuda"]
"""Build of vLLM that runs."""

KvLayoutChoice = Literal["auto", "cross-layers", "large-blocks", "engine-default"]
"""What an operator may ask for."""

MODEL_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"""vLLM's variable; its second model runner ignores cross-layer blocks, silently."""

_MEMORY_ORDER = "VLLM_KV_CACHE_LAYOUT"
"""vLLM's variable; with NHD it has no cross-layer blocks. With NixlConnector HND is the default."""
_BLOCK_SIZE = "--block-size"
_CPU_BLOCK_SIZE = 32
_LARGE_BLOCK_SIZE = 128
_LATENT_BLOCK_SIZE = 64
_CROSS_LAYERS_BLOCK_SIZE = 64
_CROSS_LAYERS_VERSIONS = ((0, 21), (0, 25))
"""First and last vLLM whose NixlConnector knows cross-layer blocks."""

_LATENT = "kv_lora_rank"
_MIXED = (
    # Layers that keep less than the whole sequence, or a state.
    "sliding_window",
    "layer_types",
    "layers_block_type",
    "mamba_d_state",
    "ssm_cfg",
    "linear_attn_config",
    "full_attention_interval",
)


@dataclass(frozen=True)
class KvLayout:
    """What vLLM is started with, and why."""

    block_size: int | None
    """Tokens per KV block; None leaves it to vLLM."""
    cross_layers: bool
    """Ask for all layers of a block side by side."""
    reason: str
    """For the log."""
    warnings: tuple[str, ...] = ()
    """What is not done as it was asked for, and what is done instead."""


class Attention(StrEnum):
    """What the layers of a model keep."""

    UNIFORM = "uniform"
    """All of them keys and values of the whole sequence."""
    LATENT = "latent"
    """All of them one vector for each token, from which heads make theirs (MLA)."""
    MIXED = "mixed"
    """Not all of them the whole sequence."""
    UNKNOWN = "unknown"


def vllm_version(text: str | None) -> tuple[int, int] | None:
    """Major and minor of a version such as "0.25.1"; None if it cannot be told."""
    found = re.match(r"(\d+)\.(\d+)", text or "")
    return (int(found.group(1)), int(found.group(2))) if found else None


def attention_of(model_config: Mapping[str, Any]) -> Attention:
    """What a model's layers keep.

    Args:
        model_config: the model's config.json; empty if it cannot be read.
    """
    if not model_config:
        return Attention.UNKNOWN
    text_config = model_config.get("text_config")
    config = text_config if isinstance(text_config, Mapping) else model_config
    for name in _MIXED:
        value = config.get(name)
        if not value:
            continue
        if name == "sliding_window" and config.get("use_sliding_window") is False:
            continue
        if name == "layer_types" and set(value) == {"full_attention"}:
            continue
        return Attention.MIXED
    return Attention.LATENT if config.get(_LATENT) else Attention.UNIFORM


@dataclass(frozen=True)
class _BlockSize:
    """What the operator says of the block size."""

    asked: int | None
    given: bool
    """True if it is asked for, or among vLLM's own flags."""

    def or_else(self, tokens: int) -> int | None:
        """For the sidecar's part of vLLM's command line."""
        return self.asked if self.given else tokens


def choose_kv_layout(
    wanted: KvLayoutChoice,
    *,
    platform: Platform,
    version: tuple[int, int] | None,
    block_size: int | None,
    flags: GivenFlags,
    environment: Mapping[str, str],
    attention: Attention,
) -> KvLayout:
    """The KV layout that vLLM is started with.

    A block size that the operator gave is kept, whatever else is chosen. All
    workers that share a conversation must come to the same choice: NIXL refuses
    the handshake of engines whose layouts differ.

    Args:
        wanted: what the operator asked for.
        platform: build of vLLM.
        version: of vLLM; None if it is not known.
        block_size: what the operator asked for.
        flags: that vLLM is given besides.
        environment: that vLLM will inherit.
        attention: what the model's layers keep.
    """
    size = _BlockSize(block_size, block_size is not None or _BLOCK_SIZE in flags)
    if platform == "cpu":
        chosen = KvLayout(size.or_else(_CPU_BLOCK_SIZE), False, "the CPU build's recipe")
        if wanted in ("cross-layers", "large-blocks"):
            chosen = replace(chosen, warnings=(f"{wanted} is for GPUs, and not used here",))
        return chosen
    if wanted == "engine-default":
        return KvLayout(block_size, False, "as settings say")
    if wanted == "large-blocks":
        return KvLayout(size.or_else(_LARGE_BLOCK_SIZE), False, "as settings say")
    if wanted == "cross-layers":
        return _cross_layers_as_asked(version, size, environment, attention)
    obstacle = _unknown(version) or _lacking(version, environment) or _second_runner(environment)
    if obstacle is not None or attention is not Attention.UNIFORM:
        return _without_cross_layers(size, attention, obstacle)
    return KvLayout(
        size.or_else(_CROSS_LAYERS_BLOCK_SIZE),
        True,
        "one descriptor for all layers of a block: the fastest pulls",
    )


def _cross_layers_as_asked(
    version: tuple[int, int] | None,
    size: _BlockSize,
    environment: Mapping[str, str],
    attention: Attention,
) -> KvLayout:
    """Cross-layer blocks, unless vLLM is known to ignore them; then the next best."""
    ignored = _lacking(version, environment)
    if attention is Attention.LATENT:
        ignored = ignored or "vLLM has no cross-layer blocks for latent attention"
    if ignored is not None:
        # To ask all the same would do nothing but rule out vLLM's second model runner.
        known = Attention.UNIFORM if attention is Attention.UNKNOWN else attention
        instead = _without_cross_layers(size, known, ignored)
        return replace(instead, warnings=(f"{ignored}: {_blocks(instead, size)} instead",))
    warnings = []
    tokens = size.or_else(_CROSS_LAYERS_BLOCK_SIZE)
    if attention is Attention.MIXED:
        tokens = size.asked
        warnings.append(
            "vLLM ignores cross-layer blocks for a model whose layers do not keep keys and values "
            "of the whole sequence alike, unless it treats them alike: "
            f"{_blocks(KvLayout(tokens, True, ''), size)}, which such a model may need"
        )
    if overridden := _second_runner(environment):
        warnings.append(f"{overridden}: it is overridden with 0 for the engine")
    return KvLayout(tokens, True, "as settings say", tuple(warnings))


def _without_cross_layers(size: _BlockSize, attention: Attention, obstacle: str | None) -> KvLayout:
    """The layout for fast pulls where cross-layer blocks are none.

    Args:
        size: what is asked for.
        attention: what the model's layers keep.
        obstacle: why there are none, if not for the model.
    """
    if attention is Attention.LATENT:
        if size.given:
            return KvLayout(size.asked, False, "the block size is given; latent attention")
        return KvLayout(
            _LATENT_BLOCK_SIZE, False, "latent attention: the block size that its backends share"
        )
    if attention is not Attention.UNIFORM:
        known = "is unknown" if attention is Attention.UNKNOWN else "has layers of different kinds"
        return KvLayout(size.asked, False, f"the model {known}: the engine's own default")
    reason = "the block size is given" if size.given else "fewer descriptors"
    return KvLayout(size.or_else(_LARGE_BLOCK_SIZE), False, f"{reason}; {obstacle}")


def _unknown(version: tuple[int, int] | None) -> str | None:
    return "no cross-layer blocks, since vLLM's version is unknown" if version is None else None


def _lacking(version: tuple[int, int] | None, environment: Mapping[str, str]) -> str | None:
    """Why vLLM has no cross-layer blocks; None if it may have them."""
    first, last = _CROSS_LAYERS_VERSIONS
    if version is not None and not first <= version <= last:
        return f"vLLM {version[0]}.{version[1]} has no cross-layer blocks"
    if environment.get(_MEMORY_ORDER) == "NHD":
        return f"{_MEMORY_ORDER}=NHD rules cross-layer blocks out"
    return None


def _second_runner(environment: Mapping[str, str]) -> str | None:
    """Why the model runner that the operator wants rules them out; None if it does not."""
    runner = environment.get(MODEL_RUNNER, "0")
    if runner in ("0", "false", "False"):
        return None
    return f"{MODEL_RUNNER}={runner} rules cross-layer blocks out"


def _blocks(layout: KvLayout, size: _BlockSize) -> str:
    """The blocks of a layout, for the log."""
    if layout.block_size is not None:
        return f"blocks of {layout.block_size} tokens"
    return "blocks of the size that is given" if size.given else "blocks of vLLM's own size"
