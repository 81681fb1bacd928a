"""Which of vLLM's flags count as given, as its own parser takes them."""

from __future__ import annotations

import pytest

from services.worker.given_flags import (
    GivenFlags,
    config_file,
    given_flags,
    with_config_apart,
)


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (["--block-size", "32"], "--block-size"),
        (["--block-size=32"], "--block-size"),
        (["--block_size", "32"], "--block-size"),
        (["--block_size=32"], "--block-size"),
        (["--block-siz", "32"], "--block-size"),
        (["--seed", "1", "--block_si=32"], "--block-size"),
        (["--no-enforce-eager"], "--enforce-eager"),
        (["--no_enforce_eager"], "--enforce-eager"),
        (["--kv-transfer-config.kv_role", "kv_both"], "--kv-transfer-config"),
        (["--kv_transfer_config.kv_connector_extra_config.a=1"], "--kv-transfer-config"),
    ],
)
def test_a_flag_is_given_however_it_is_written(arguments: list[str], flag: str) -> None:
    assert flag in given_flags(arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--block-size-of-something", "32"],
        ["--hf-overrides", '{"block-size": 32}'],
        ["block-size", "-block-size", "--", "--no-"],
        ["--prefix=--block-size"],
    ],
)
def test_another_flag_or_a_value_is_not(arguments: list[str]) -> None:
    assert "--block-size" not in given_flags(arguments)


@pytest.mark.parametrize("key", ["block-size", "block_size"])
def test_what_stands_in_a_file_is_given(key: str) -> None:
    given = given_flags(["--seed", "1"], [key, "max-model-len"])
    assert "--block-size" in given
    assert "--max-model-len" in given
    assert "--seed" in given
    assert "--dtype" not in given


def test_nothing_is_given_without_flags() -> None:
    assert given_flags([]) == GivenFlags()
    assert "--block-size" not in GivenFlags()


def test_a_file_is_named_in_two_arguments() -> None:
    apart = with_config_apart(["--seed=1", "--config=a=b.yaml", "--config-format=hf"])
    assert apart == ["--seed=1", "--config", "a=b.yaml", "--config-format=hf"]
    assert config_file(apart) == "a=b.yaml"
    assert with_config_apart(["--config", "a.yaml"]) == ["--config", "a.yaml"]


@pytest.mark.parametrize("arguments", [[], ["--config"], ["--seed", "1", "--config-format", "hf"]])
def test_without_a_name_there_is_no_file(arguments: list[str]) -> None:
    assert config_file(arguments) is None
