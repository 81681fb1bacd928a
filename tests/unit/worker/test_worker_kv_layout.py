"""Choosing block size and cross-layer blocks for fast pulls."""

from __future__ import annotations

from typing import Any

import pytest

from services.worker.given_flags import GivenFlags, given_flags
from services.worker.kv_layout import (
    MODEL_RUNNER,
    Attention,
    KvLayout,
    attention_of,
    choose_kv_layout,
    vllm_version,
)


def _choose(wanted: Any = "auto", **changes: Any) -> KvLayout:
    given: dict[str, Any] = {
        "platform": "cuda",
        "version": (0, 25),
        "block_size": None,
        "flags": GivenFlags(),
        "environment": {},
        "attention": Attention.UNIFORM,
    }
    return choose_kv_layout(wanted, **(given | changes))


@pytest.mark.parametrize("version", [(0, 21), (0, 25)])
def test_versions_that_know_cross_layer_blocks_get_them(version: tuple[int, int]) -> None:
    layout = _choose(version=version)
    assert (layout.block_size, layout.cross_layers) == (64, True)
    assert _choose("cross-layers", version=version).block_size == 64


@pytest.mark.parametrize("version", [(0, 20), (0, 26), (0, 33), (1, 0), None])
def test_other_versions_get_blocks_of_128_and_the_reason_says_so(
    version: tuple[int, int] | None,
) -> None:
    layout = _choose(version=version)
    assert (layout.block_size, layout.cross_layers) == (128, False)
    assert "cross-layer" in layout.reason


def test_an_operator_who_wants_the_second_model_runner_gets_blocks_of_128() -> None:
    layout = _choose(environment={"VLLM_USE_V2_MODEL_RUNNER": "1"})
    assert (layout.block_size, layout.cross_layers) == (128, False)
    assert "VLLM_USE_V2_MODEL_RUNNER" in layout.reason
    assert _choose(environment={"VLLM_USE_V2_MODEL_RUNNER": "0"}).cross_layers


@pytest.mark.parametrize("wanted", ["auto", "cross-layers"])
def test_an_order_of_memory_that_has_no_cross_layer_blocks_is_kept(wanted: str) -> None:
    layout = _choose(wanted, environment={"VLLM_KV_CACHE_LAYOUT": "NHD"})
    assert (layout.block_size, layout.cross_layers) == (128, False)
    assert "VLLM_KV_CACHE_LAYOUT=NHD" in layout.reason
    assert _choose(wanted, environment={"VLLM_KV_CACHE_LAYOUT": "HND"}).cross_layers


@pytest.mark.parametrize("wanted", ["auto", "cross-layers"])
def test_a_given_block_size_is_kept(wanted: str) -> None:
    layout = _choose(wanted, block_size=32)
    assert (layout.block_size, layout.cross_layers) == (32, True)
    assert _choose(wanted, version=(0, 33), block_size=32).block_size == 32
    assert _choose("large-blocks", block_size=32).block_size == 32


_BLOCKS_OF_32 = given_flags(["--block_size", "32"])


@pytest.mark.parametrize("wanted", ["auto", "cross-layers", "large-blocks", "engine-default"])
@pytest.mark.parametrize("version", [(0, 25), (0, 33)])
@pytest.mark.parametrize("platform", ["cuda", "cpu"])
def test_a_block_size_among_the_engines_flags_is_not_doubled(
    platform: str, version: tuple[int, int], wanted: str
) -> None:
    layout = _choose(wanted, version=version, platform=platform, flags=_BLOCKS_OF_32)
    assert layout.block_size is None


@pytest.mark.parametrize("attention", [Attention.MIXED, Attention.UNKNOWN])
def test_a_model_that_may_not_support_it_is_left_to_the_engine(attention: Attention) -> None:
    layout = _choose(attention=attention)
    assert (layout.block_size, layout.cross_layers) == (None, False)
    assert "model" in layout.reason


def test_latent_attention_gets_the_block_size_of_its_backends() -> None:
    layout = _choose(attention=Attention.LATENT)
    assert (layout.block_size, layout.cross_layers) == (64, False)
    assert "latent" in layout.reason
    assert _choose(attention=Attention.LATENT, block_size=128).block_size == 128
    assert _choose(attention=Attention.LATENT, flags=_BLOCKS_OF_32).block_size is None


@pytest.mark.parametrize(
    ("changes", "size", "said"),
    [
        ({"version": (0, 33)}, 128, "vLLM 0.33 has no cross-layer blocks: blocks of 128"),
        # What the operator asks for says that the model is of one kind.
        ({"version": (0, 33), "attention": Attention.UNKNOWN}, 128, "blocks of 128"),
        ({"version": (0, 33), "attention": Attention.LATENT}, 64, "vLLM 0.33"),
        ({"version": (0, 33), "attention": Attention.MIXED}, None, "blocks of vLLM's own size"),
        ({"attention": Attention.LATENT}, 64, "for latent attention: blocks of 64"),
        ({"version": (0, 33), "block_size": 32}, 32, "blocks of 32"),
        ({"version": (0, 33), "flags": _BLOCKS_OF_32}, None, "the size that is given"),
    ],
)
@pytest.mark.parametrize("runner", ["0", "1"])
def test_where_vllm_ignores_cross_layer_blocks_the_next_best_is_taken_and_it_is_said(
    runner: str, changes: dict[str, Any], size: int | None, said: str
) -> None:
    """And the model runner is left to the operator."""
    layout = _choose("cross-layers", environment={MODEL_RUNNER: runner}, **changes)
    assert (layout.block_size, layout.cross_layers) == (size, False)
    (warning,) = layout.warnings
    assert said in warning


@pytest.mark.parametrize("attention", [Attention.UNIFORM, Attention.UNKNOWN])
def test_the_model_runner_that_ignores_them_is_overridden_and_blocks_are_as_without(
    attention: Attention,
) -> None:
    layout = _choose("cross-layers", environment={MODEL_RUNNER: "1"}, attention=attention)
    assert (layout.block_size, layout.cross_layers) == (64, True)
    (warning,) = layout.warnings
    assert "RUNNER=1" in warning
    assert "overridden with 0" in warning


def test_where_vllm_may_ignore_them_they_are_asked_for_in_blocks_of_its_own() -> None:
    layout = _choose("cross-layers", attention=Attention.MIXED, environment={MODEL_RUNNER: "1"})
    assert (layout.block_size, layout.cross_layers) == (None, True)
    ignored, overridden = layout.warnings
    assert "blocks of vLLM's own size" in ignored
    assert "overridden with 0" in overridden


def test_nothing_is_said_of_what_vllm_does() -> None:
    assert _choose("cross-layers").warnings == ()
    assert _choose("auto", version=(0, 33), attention=Attention.MIXED).warnings == ()
    assert _choose("large-blocks", platform="cpu").warnings == (
        "large-blocks is for GPUs, and not used here",
    )


def test_what_the_operator_asks_for_is_done_where_nothing_is_known() -> None:
    assert _choose("cross-layers", version=None, attention=Attention.UNKNOWN).cross_layers
    assert _choose("large-blocks").block_size == 128
    assert not _choose("large-blocks").cross_layers
    assert _choose("engine-default") == KvLayout(None, False, "as settings say")


def test_the_cpu_build_has_its_own_recipe() -> None:
    assert _choose("cross-layers", platform="cpu").block_size == 32
    assert not _choose("cross-layers", platform="cpu").cross_layers
    assert _choose(platform="cpu", block_size=16).block_size == 16


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.25.1", (0, 25)),
        ("0.32.0+cpu", (0, 32)),
        ("1.0rc1", (1, 0)),
        ("dev", None),
        ("", None),
        (None, None),
    ],
)
def test_versions_are_read(text: str | None, version: tuple[int, int] | None) -> None:
    assert vllm_version(text) == version


@pytest.mark.parametrize(
    ("config", "attention"),
    [
        ({"model_type": "qwen3"}, Attention.UNIFORM),
        ({"model_type": "qwen3", "sliding_window": None}, Attention.UNIFORM),
        ({"sliding_window": 4096, "use_sliding_window": False}, Attention.UNIFORM),
        ({"layer_types": ["full_attention", "full_attention"]}, Attention.UNIFORM),
        ({"sliding_window": 4096}, Attention.MIXED),
        ({"layer_types": ["full_attention", "sliding_attention"]}, Attention.MIXED),
        ({"kv_lora_rank": 512}, Attention.LATENT),
        ({"kv_lora_rank": 512, "linear_attn_config": {"a": 1}}, Attention.MIXED),
        ({"mamba_d_state": 128}, Attention.MIXED),
        ({"text_config": {"kv_lora_rank": 512}}, Attention.LATENT),
        ({"text_config": {"model_type": "qwen3"}, "vision_config": {}}, Attention.UNIFORM),
        ({}, Attention.UNKNOWN),
    ],
)
def test_models_are_told_apart_by_what_their_layers_keep(
    config: dict[str, Any], attention: Attention
) -> None:
    assert attention_of(config) is attention
