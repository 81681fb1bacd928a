"""Choosing block size and cross-layer blocks for fast pulls."""

from __future__ import annotations

from typing import Any

import pytest

from services.worker.kv_layout import KvLayout, choose_kv_layout, is_uniform, vllm_version


def _choose(wanted: Any = "auto", **changes: Any) -> KvLayout:
    given: dict[str, Any] = {
        "platform": "cuda",
        "version": (0, 25),
        "block_size": None,
        "engine_args": [],
        "environment": {},
        "uniform": True,
    }
    return choose_kv_layout(wanted, **(given | changes))


@pytest.mark.parametrize("version", [(0, 21), (0, 25)])
def test_versions_that_know_cross_layer_blocks_get_them(version: tuple[int, int]) -> None:
    layout = _choose(version=version)
    assert layout.cross_layers
    assert layout.block_size is None


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


def test_a_given_block_size_is_kept() -> None:
    assert _choose(block_size=64).block_size == 64
    assert _choose(block_size=64).cross_layers
    assert _choose(version=(0, 33), block_size=64).block_size == 64
    assert _choose("large-blocks", block_size=64).block_size == 64


@pytest.mark.parametrize("engine_args", [["--block-size", "32"], ["--block-size=32"]])
def test_a_block_size_among_the_engines_flags_is_not_doubled(engine_args: list[str]) -> None:
    assert _choose(version=(0, 33), engine_args=engine_args).block_size is None


@pytest.mark.parametrize("uniform", [False, None])
def test_a_model_that_may_not_support_it_is_left_to_the_engine(uniform: bool | None) -> None:
    layout = _choose(uniform=uniform)
    assert (layout.block_size, layout.cross_layers) == (None, False)
    assert "model" in layout.reason


def test_what_the_operator_asks_for_is_done_whatever_the_version() -> None:
    assert _choose("cross-layers", version=(0, 33), uniform=None).cross_layers
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
    ("config", "uniform"),
    [
        ({"model_type": "qwen3"}, True),
        ({"model_type": "qwen3", "sliding_window": None}, True),
        ({"sliding_window": 4096, "use_sliding_window": False}, True),
        ({"layer_types": ["full_attention", "full_attention"]}, True),
        ({"sliding_window": 4096}, False),
        ({"layer_types": ["full_attention", "sliding_attention"]}, False),
        ({"kv_lora_rank": 512}, False),
        ({"mamba_d_state": 128}, False),
        ({"text_config": {"kv_lora_rank": 512}}, False),
        ({"text_config": {"model_type": "qwen3"}, "vision_config": {}}, True),
        ({}, None),
    ],
)
def test_models_with_layers_of_one_kind_are_told_apart(
    config: dict[str, Any], uniform: bool | None
) -> None:
    assert is_uniform(config) is uniform
