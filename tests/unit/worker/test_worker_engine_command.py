"""The command line and environment that start vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.worker.engine_command import (
    OWNED_FLAGS,
    EngineCommand,
    EngineOptions,
    Role,
    engine_command,
)
from services.worker.given_flags import GivenFlags, given_flags
from services.worker.kv_layout import KvLayout


def _command(**changes: Any) -> EngineCommand:
    options: dict[str, Any] = {
        "role": "decode",
        "platform": "cpu",
        "python": "/env/bin/python",
        "model": "/models/tiny",
        "model_is_local": True,
        "served_model_name": "tiny",
        "port": 8200,
        "side_channel_host": "10.0.0.7",
        "side_channel_port": 5700,
        "events_socket": Path("/run/kvloop/d.sock"),
        "import_root": Path("/opt/kvloop"),
        "kv_recompute_threshold": 64,
        "decoder_kv_blocks_ttl_seconds": 480,
        "pin_lease_seconds": 60,
        "kv_layout": KvLayout(None, False, "test"),
        "cpu_kv_cache_gib": None,
        "cpu_threads": None,
        "extra_args": [],
        "given": GivenFlags(),
    }
    return engine_command(EngineOptions(**(options | changes)))


def _flag(command: EngineCommand, name: str) -> str:
    return command.argv[list(command.argv).index(name) + 1]


def _transfer_config(command: EngineCommand) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(_flag(command, "--kv-transfer-config"))
    return config


def test_vllm_serves_the_model_on_loopback() -> None:
    command = _command()
    assert list(command.argv[:3]) == [
        "/env/bin/python",
        "-m",
        "vllm.entrypoints.openai.api_server",
    ]
    assert _flag(command, "--model") == "/models/tiny"
    assert _flag(command, "--served-model-name") == "tiny"
    assert _flag(command, "--host") == "127.0.0.1"
    assert _flag(command, "--port") == "8200"


@pytest.mark.parametrize(
    ("role", "kv_role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")]
)
def test_our_connector_is_loaded_with_the_roles_transfer_config(role: Role, kv_role: str) -> None:
    config = _transfer_config(
        _command(
            role=role,
            kv_recompute_threshold=128,
            decoder_kv_blocks_ttl_seconds=240,
            pin_lease_seconds=20,
        )
    )
    assert config == {
        "kv_connector": "KvloopConnector",
        "kv_connector_module_path": "services.worker.connector",
        "kv_role": kv_role,
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "bidirectional_kv_xfer": True,
            "kv_recompute_threshold": 128,
            "decoder_kv_blocks_ttl": 240,
            "kvloop_pin_lease": 20,
        },
    }


def test_the_connector_finds_the_sidecar_and_can_be_imported() -> None:
    environment = _command().environment({"PYTHONPATH": "/mine", "HOME": "/root"})
    assert environment["KVLOOP_EVENTS_SOCKET"] == "/run/kvloop/d.sock"
    assert environment["PYTHONPATH"] == "/opt/kvloop:/mine"
    assert environment["HOME"] == "/root"
    assert _command().environment({})["PYTHONPATH"] == "/opt/kvloop"


def test_side_channel_and_ttl_reach_old_and_new_versions() -> None:
    command = _command(decoder_kv_blocks_ttl_seconds=60)
    environment = command.environment({"VLLM_NIXL_SIDE_CHANNEL_HOST": "localhost"})
    assert environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.0.0.7"
    assert environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5700"
    assert environment["VLLM_NIXL_ABORT_REQUEST_TIMEOUT"] == "60"
    assert int(environment["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]) > 60
    assert environment["PYTHONHASHSEED"] == "0"


def test_the_cpu_recipe() -> None:
    command = _command()
    assert _flag(command, "--dtype") == "float32"
    assert "--enforce-eager" in command.argv
    environment = command.environment({})
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["UCX_TLS"] == "tcp,self,sm,cma,posix,sysv"
    assert "UCX_CUDA_IPC_ENABLE_GET_ZCOPY" not in environment


def test_the_cuda_recipe() -> None:
    command = _command(platform="cuda")
    assert _transfer_config(command)["kv_buffer_device"] == "cuda"
    assert "--dtype" not in command.argv
    assert "--block-size" not in command.argv
    environment = command.environment({})
    assert environment["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] == "y"
    assert "UCX_TLS" not in environment


def test_the_chosen_block_size_reaches_vllm() -> None:
    command = _command(platform="cuda", kv_layout=KvLayout(128, False, "test"))
    assert _flag(command, "--block-size") == "128"
    assert "VLLM_USE_V2_MODEL_RUNNER" not in command.environment({})
    assert "enable_cross_layers_blocks" not in json.dumps(_transfer_config(command))


def test_cross_layer_blocks_come_with_the_model_runner_that_knows_them() -> None:
    command = _command(platform="cuda", kv_layout=KvLayout(None, True, "test"))
    extra = _transfer_config(command)["kv_connector_extra_config"]
    assert extra["enable_cross_layers_blocks"] is True
    assert command.environment({})["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert "--block-size" not in command.argv


def test_the_operators_environment_wins_over_defaults_but_not_over_settings() -> None:
    mine = {"OMP_NUM_THREADS": "8", "UCX_TLS": "all", "VLLM_CPU_KVCACHE_SPACE": "4"}
    environment = _command(cpu_kv_cache_gib=2).environment(mine)
    assert environment["OMP_NUM_THREADS"] == "8"
    assert environment["UCX_TLS"] == "all"
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert _command(cpu_threads=3).environment(mine)["OMP_NUM_THREADS"] == "3"


def test_the_hub_is_not_asked_for_a_local_model() -> None:
    assert _command().environment({})["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in _command(model_is_local=False).environment({})


_CPU_DEFAULTS = {"--disable-uvicorn-access-log", "--dtype", "--enforce-eager", "--max-num-seqs"}


@pytest.mark.parametrize(
    ("key", "flag"),
    [
        ("dtype", "--dtype"),
        ("max_num_seqs", "--max-num-seqs"),
        ("no-enforce-eager", "--enforce-eager"),
        ("disable-uvicorn-access-log", "--disable-uvicorn-access-log"),
        ("max-model-len", None),
    ],
)
def test_what_is_given_in_a_file_takes_the_place_of_a_default(key: str, flag: str | None) -> None:
    """vLLM would take the command line's."""
    command = _command(given=given_flags([], [key]))
    assert _CPU_DEFAULTS - set(command.argv) == {flag} - {None}
    assert ("float32" in command.argv, "16" in command.argv) == (
        flag != "--dtype",
        flag != "--max-num-seqs",
    )


def test_the_sidecars_own_flags_are_set_whatever_is_given() -> None:
    given = given_flags([], [flag.removeprefix("--") for flag in OWNED_FLAGS])
    assert set(OWNED_FLAGS) <= set(_command(given=given).argv)


def test_further_flags_come_last() -> None:
    command = _command(extra_args=["--max-num-seqs", "4"])
    assert list(command.argv[-2:]) == ["--max-num-seqs", "4"]


def test_the_transports_of_nixl_are_vllms_choice_unless_they_are_named() -> None:
    def named(**changes: Any) -> Any:
        extra = _transfer_config(_command(**changes))["kv_connector_extra_config"]
        return extra.get("backends")

    assert named() is None
    assert named(nixl_backends=["LIBFABRIC"]) == ["LIBFABRIC"]
