"""Choosing block size and cross-layer blocks for fast pulls."""

from __future__ import annotations

from typing import Any

import pytest

from services.worker.kv_layout import (
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
        "engine_args": [],
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
def test_a_given_block_size_is_kept(wanted: str) -> None:
    layout = _choose(wanted, block_size=32)
    assert (layout.block_size, layout.cross_layers) == (32, True)
    assert _choose(wanted, version=(0, 33), block_size=32).block_size == 32
    assert _choose("large-blocks", block_size=32).block_size == 32


@pytest.mark.parametrize("engine_args", [["--block-size", "32"], ["--block-size=32"]])
@pytest.mark.parametrize("wanted", ["auto", "cross-layers", "large-blocks"])
@pytest.mark.parametrize("version", [(0, 25), (0, 33)])
def test_a_block_size_among_the_engines_flags_is_not_doubled(
    version: tuple[int, int], wanted: str, engine_args: list[str]
) -> None:
    assert _choose(wanted, version=version, engine_args=engine_args).block_size is None


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
    flags = ["--block-size", "32"]
    assert _choose(attention=Attention.LATENT, engine_args=flags).block_size is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": (0, 33)}, "vLLM 0.33 ignores cross-layer blocks"),
        ({"attention": Attention.LATENT}, "for this model"),
        ({"attention": Attention.MIXED}, "for this model"),
        ({"environment": {"VLLM_USE_V2_MODEL_RUNNER": "1"}}, "RUNNER=1 is overridden with 0"),
    ],
)
def test_it_is_said_what_vllm_ignores(changes: dict[str, Any], said: str) -> None:
    layout = _choose("cross-layers", **changes)
    (warning,) = layout.warnings
    assert said in warning
    assert (layout.block_size, layout.cross_layers) == (None, True)


def test_nothing_is_said_of_what_vllm_does() -> None:
    assert _choose("cross-layers").warnings == ()
    assert _choose("auto", version=(0, 33), attention=Attention.MIXED).warnings == ()
    assert _choose("large-blocks", platform="cpu").warnings == (
        "large-blocks is for GPUs, and not used here",
    )


def test_what_the_operator_asks_for_is_done_whatever_the_version() -> None:
    assert _choose("cross-layers", version=(0, 33), attention=Attention.UNKNOWN).cross_layers
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
