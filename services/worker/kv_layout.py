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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Literal

Platform = Literal["cpu", "cuda"]
"""Build of vLLM that runs."""

KvLayoutChoice = Literal["auto", "cross-layers", "large-blocks", "engine-default"]
"""What an operator may ask for."""

MODEL_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"""vLLM's variable; its second model runner ignores cross-layer blocks, silently."""

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
    """What vLLM will ignore of what was asked for, and what it takes instead."""


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


def choose_kv_layout(
    wanted: KvLayoutChoice,
    *,
    platform: Platform,
    version: tuple[int, int] | None,
    block_size: int | None,
    engine_args: Sequence[str],
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
        engine_args: further flags for vLLM.
        environment: that vLLM will inherit.
        attention: what the model's layers keep.
    """
    if platform == "cpu":
        chosen = KvLayout(block_size or _CPU_BLOCK_SIZE, False, "the CPU build's recipe")
        if wanted in ("cross-layers", "large-blocks"):
            chosen = replace(chosen, warnings=(f"{wanted} is for GPUs, and not used here",))
        return chosen
    given = block_size is not None or any(
        argument.partition("=")[0] == "--block-size" for argument in engine_args
    )
    if wanted == "engine-default":
        return KvLayout(block_size, False, "as settings say")
    if wanted == "cross-layers":
        ignored = _cross_layers_ignored(version, environment, attention)
        # Where vLLM ignores them its own block size is the better one to be told of.
        size = block_size if given or ignored else _CROSS_LAYERS_BLOCK_SIZE
        return KvLayout(size, True, "as settings say", ignored)
    large = block_size if given else _LARGE_BLOCK_SIZE
    if wanted == "large-blocks":
        return KvLayout(large, False, "as settings say")
    if attention is Attention.LATENT:
        if given:
            return KvLayout(block_size, False, "the block size is given; latent attention")
        return KvLayout(
            _LATENT_BLOCK_SIZE, False, "latent attention: the block size that its backends share"
        )
    if attention is not Attention.UNIFORM:
        known = "is unknown" if attention is Attention.UNKNOWN else "has layers of different kinds"
        return KvLayout(block_size, False, f"the model {known}: the engine's own default")
    if (obstacle := _cross_layers_obstacle(version, environment)) is None:
        return KvLayout(
            block_size if given else _CROSS_LAYERS_BLOCK_SIZE,
            True,
            "one descriptor for all layers of a block: the fastest pulls",
        )
    if given:
        return KvLayout(block_size, False, f"the block size is given; {obstacle}")
    return KvLayout(large, False, f"fewer descriptors; {obstacle}")


def _cross_layers_obstacle(
    version: tuple[int, int] | None, environment: Mapping[str, str]
) -> str | None:
    """Why cross-layer blocks are not used; None if they can be."""
    first, last = _CROSS_LAYERS_VERSIONS
    if version is None:
        return "no cross-layer blocks, since vLLM's version is unknown"
    if not first <= version <= last:
        return f"vLLM {version[0]}.{version[1]} has no cross-layer blocks"
    if environment.get(MODEL_RUNNER, "0") not in ("0", "false", "False"):
        return f"{MODEL_RUNNER} is set, which rules cross-layer blocks out"
    return None


def _cross_layers_ignored(
    version: tuple[int, int] | None, environment: Mapping[str, str], attention: Attention
) -> tuple[str, ...]:
    """What vLLM does not do although cross-layer blocks were asked for."""
    found = []
    first, last = _CROSS_LAYERS_VERSIONS
    if version is not None and not first <= version <= last:
        found.append(
            f"vLLM {version[0]}.{version[1]} ignores cross-layer blocks: it has its default "
            "block size, and pulls are slow; ask for large-blocks or auto"
        )
    if attention in (Attention.LATENT, Attention.MIXED):
        found.append(
            "vLLM ignores cross-layer blocks for this model, whose layers do not keep keys and "
            "values of the whole sequence alike; ask for auto"
        )
    if (runner := environment.get(MODEL_RUNNER, "0")) not in ("0", "false", "False"):
        found.append(
            f"{MODEL_RUNNER}={runner} is overridden with 0 for the engine: its second model "
            "runner ignores cross-layer blocks"
        )
    return tuple(found)
