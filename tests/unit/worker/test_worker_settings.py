"""Settings: defaults by role, environment, flags, and what is refused."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import pytest
from pydantic import ValidationError
from pydantic_settings import CliApp

from services.worker.settings import WorkerSettings


def _settings(*flags: str) -> WorkerSettings:
    return CliApp.run(WorkerSettings, cli_args=["--model=/models/tiny", *flags])


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("KVLOOP_"):
            monkeypatch.delenv(name)


def test_prepared_legs_leave_other_requests_half_of_the_connections() -> None:
    few = _settings("--role=decode", "--engine-max-connections=100")
    assert few.prepared_legs_limit == 50
    assert _settings("--role=decode").prepared_legs_limit == 256
    assert _settings("--role=decode", "--prepared-legs=0").prepared_legs_limit == 0


@pytest.mark.parametrize(
    ("role", "listen", "engine", "side_channel"),
    [("prefill", 7300, 8100, 5600), ("decode", 7400, 8200, 5700)],
)
def test_ports_depend_on_the_role(role: str, listen: int, engine: int, side_channel: int) -> None:
    settings = _settings(f"--role={role}")
    assert settings.role == role
    assert settings.listen == f"127.0.0.1:{listen}"
    assert settings.engine_port == engine
    assert settings.side_channel_port == side_channel
    assert settings.engine_base_url == f"http://127.0.0.1:{engine}"


def test_names_and_paths_follow_the_worker_id() -> None:
    settings = _settings("--role=decode")
    assert settings.worker_id == f"decode-{socket.gethostname()}-7400"
    named = _settings("--role=decode", "--worker-id=d0")
    directory = Path(tempfile.gettempdir()) / f"kvloop-{os.getuid()}"
    assert named.events_socket == directory / "d0.sock"
    assert named.engine_log == directory / "d0.log"


def test_defaults_that_users_of_the_feature_know() -> None:
    settings = _settings("--role=decode")
    assert settings.decoder_kv_blocks_ttl_seconds == 480
    assert settings.kv_recompute_threshold == 64


def test_retained_kv_takes_half_of_the_memory_for_a_minute_unless_it_is_renewed() -> None:
    settings = _settings("--role=decode")
    assert settings.pin_lease_seconds == 60
    assert (settings.retained_blocks_share, settings.free_blocks_share) == (0.5, 0.1)
    assert settings.retention_policy == "value"
    assert _settings("--role=decode", "--retention-policy=lru").retention_policy == "lru"


@pytest.mark.parametrize(
    "flag",
    [
        "--pin-lease-seconds=11",  # the prefill engine's own margin would eat it up
        "--retained-blocks-share=0",
        "--retained-blocks-share=1.1",
        "--free-blocks-share=1",
        "--retention-policy=fifo",
    ],
)
def test_shares_and_leases_that_make_no_sense_are_refused(flag: str) -> None:
    with pytest.raises((ValidationError, SystemExit)):
        _settings("--role=decode", flag)


def test_environment_variables_are_overridden_by_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLOOP_WORKER_ROLE", "prefill")
    monkeypatch.setenv("KVLOOP_WORKER_LOG_JSON", "true")
    monkeypatch.setenv("KVLOOP_WORKER_KV_RECOMPUTE_THRESHOLD", "256")
    settings = _settings("--kv-recompute-threshold=128")
    assert (settings.role, settings.log_json) == ("prefill", True)
    assert settings.kv_recompute_threshold == 128


def test_the_model_name_is_the_directorys_or_the_hubs(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    local = CliApp.run(WorkerSettings, cli_args=["--role=decode", f"--model={tmp_path}/tiny/"])
    assert local.model_name == "tiny"
    hub = CliApp.run(WorkerSettings, cli_args=["--role=decode", "--model=org/name"])
    assert hub.model_name == "org/name"
    assert _settings("--role=decode", "--served-model-name=x").model_name == "x"
    attached = CliApp.run(WorkerSettings, cli_args=["--role=decode", "--engine-url=http://h:1"])
    assert attached.model_name is None
    assert attached.engine_base_url == "http://h:1"


def test_engine_args_are_split_as_a_shell_would() -> None:
    settings = _settings("--role=decode", "--engine-args=--max-model-len 8192 --x '{\"a\": 1}'")
    assert settings.extra_engine_args == ["--max-model-len", "8192", "--x", '{"a": 1}']


def test_a_file_of_flags_is_named_as_vllm_reads_it() -> None:
    """It ignores --config=FILE."""
    settings = _settings("--role=decode", "--engine-args=--config=vllm.yaml --seed=1")
    assert settings.extra_engine_args == ["--config", "vllm.yaml", "--seed=1"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--role=decode", "--listen=7400"], "not host:port"),
        (["--role=decode", "--listen=::1:7400"], "brackets"),
        (["--role=decode", "--advertise=http://h:1"], "scheme"),
        (["--role=decode", "--listen=0.0.0.0:7400"], "--advertise"),
        (["--role=decode", "--listen=[::]:7400"], "--advertise"),
        (["--role=decode", "--engine-url=h:1"], "not a URL"),
        (["--role=decode", "--engine-args=--port 1"], "sets it itself"),
        (["--role=decode", "--engine-args=--kv-transfer-config={}"], "sets it itself"),
        (["--role=decode", "--engine-args=--served_model_name x"], "--served-model-name in"),
        (["--role=decode", "--engine-args=--kv-transfer-config.kv_role=x"], "sets it itself"),
        (["--role=decode", "--worker-id=a/b"], "pattern"),
        (["--role=decode", "--commit-timeout-seconds=0"], "greater than 0"),
        (["--role=both"], "prefill"),
    ],
)
def test_what_cannot_work_is_refused_with_a_hint(flags: list[str], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        _settings(*flags)


def test_a_wildcard_address_is_fine_with_an_advertised_one() -> None:
    settings = _settings("--role=decode", "--listen=[::]:7400", "--advertise=[fd00::1]:7400")
    assert settings.advertise == "[fd00::1]:7400"


def test_either_a_model_or_an_engine_is_needed() -> None:
    with pytest.raises(ValidationError, match="--engine-url"):
        CliApp.run(WorkerSettings, cli_args=["--role=decode"])
