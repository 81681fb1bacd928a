"""Choosing the platform, and making the connector importable for the engine."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic_settings import CliApp
from structlog.testing import capture_logs

import services
from services.worker import (
    engine_detokenizer,
    engine_events,
    engine_front,
    engine_log,
    engine_plugin,
)
from services.worker.launcher import (
    choose_platform,
    config_keys,
    import_root,
    installed_vllm,
    launch,
    read_model_config,
)
from services.worker.settings import WorkerSettings
from tests.unit.worker.fakes import until

pytestmark = pytest.mark.timeout(90)  # processes take their time to start


@pytest.mark.parametrize(
    ("setting", "gpu", "platform"),
    [
        ("auto", True, "cuda"),
        ("auto", False, "cpu"),
        ("cpu", True, "cpu"),
        ("cuda", False, "cuda"),
    ],
)
def test_the_platform_is_what_settings_say_or_the_machine_has(
    setting: Literal["auto", "cpu", "cuda"], gpu: bool, platform: str
) -> None:
    assert choose_platform(setting, lambda: gpu) == platform


def test_a_checkout_is_on_the_engines_path_as_it_is() -> None:
    with import_root("/other/python") as root:
        assert (root / "services" / "worker" / "connector.py").exists()


def test_packages_of_another_environment_stay_off_the_engines_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site-packages"
    (site / "services" / "worker").mkdir(parents=True)
    (site / "services" / "worker" / "connector.py").write_text("FOUND = True\n")
    (site / "json.py").write_text("raise RuntimeError('shadowed')\n")
    monkeypatch.setattr(services, "__path__", [str(site / "services")])
    with import_root("/other/python") as root:
        assert [entry.name for entry in root.iterdir()] == ["services"]
        script = "import json, services.worker.connector as c; assert c.FOUND"
        subprocess.run(
            [sys.executable, "-S", "-c", script],
            env={"PYTHONPATH": str(root)},
            cwd=tmp_path,
            check=True,
        )
    assert not root.exists()
    with import_root(sys.executable) as root:
        assert root == site


def test_vllm_in_another_environment_finds_the_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an installation has it: its own metadata, and the plugin's modules."""
    site = tmp_path / "site-packages"
    (site / "services" / "worker").mkdir(parents=True)
    parts = (engine_detokenizer, engine_events, engine_front, engine_log, engine_plugin)
    for module in parts:
        assert module.__file__
        shutil.copy(module.__file__, site / "services" / "worker")
    installed = distribution("kvloop")
    metadata = site / f"kvloop-{installed.version}.dist-info"
    metadata.mkdir()
    for name in ("METADATA", "entry_points.txt"):
        (metadata / name).write_text(installed.read_text(name) or "")
    monkeypatch.setattr(services, "__path__", [str(site / "services")])
    script = """
from importlib.metadata import entry_points
(plugin,) = entry_points(group="vllm.general_plugins")
print(plugin.name, plugin.load().__name__)
"""
    with import_root("/other/python") as root:
        told = subprocess.run(
            [sys.executable, "-S", "-c", script],
            env={"PYTHONPATH": str(root)},
            cwd=tmp_path,
            check=True,
            capture_output=True,
            text=True,
        )
    assert told.stdout == "kvloop register\n"


def test_the_engines_interpreter_is_asked_for_its_version(tmp_path: Path) -> None:
    engine_python = tmp_path / "python"
    engine_python.write_text("#!/bin/sh\necho 0.25.1\n")
    engine_python.chmod(0o755)
    assert installed_vllm(str(engine_python)) == "0.25.1"


def test_an_interpreter_without_vllm_has_no_version(tmp_path: Path) -> None:
    engine_python = tmp_path / "python"
    engine_python.write_text("#!/bin/sh\necho 'No package metadata' >&2\nexit 1\n")
    engine_python.chmod(0o755)
    assert installed_vllm(str(engine_python)) is None
    assert installed_vllm(str(tmp_path / "missing")) is None


def test_the_engines_interpreter_reads_a_file_of_flags(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("block_size: 32\n'max-model-len': 2k\nenforce-eager: false\n1: 2\n")
    told = config_keys(sys.executable, str(file))
    assert told == ["block_size", "max-model-len", "enforce-eager", "1"]


@pytest.mark.parametrize("content", [None, "", "32", "a: [", "!!python/object:os.system {}"])
def test_what_is_no_file_of_flags_is_not_read(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "vllm.yaml"
    if content is not None:
        file.write_text(content)
    assert config_keys(sys.executable, str(file)) is None
    assert config_keys(str(tmp_path / "missing"), str(file)) is None


async def _started(tmp_path: Path, engine_args: str) -> tuple[list[str], list[Any]]:
    """The command line of a GPU's engine, and what the log says."""
    engine_python, log = tmp_path / "python", tmp_path / "engine.log"
    engine_python.write_text(_ENGINE_PYTHON.format(python=sys.executable))
    engine_python.chmod(0o755)
    flags = {
        "role": "decode",
        "model": tmp_path,
        "platform": "cuda",
        "kv-layout": "large-blocks",
        "engine-python": engine_python,
        "engine-args": engine_args,
        "engine-log": log,
    }
    settings = CliApp.run(
        WorkerSettings, cli_args=[f"--{name}={value}" for name, value in flags.items()]
    )
    with capture_logs() as logs:
        async with launch(settings):
            await until(lambda: log.exists() and "<end>" in log.read_text(), 60)
    return log.read_text().splitlines(), logs


_ENGINE_PYTHON = """#!/bin/sh
if [ "$1" = -c ]; then exec {python} "$@"; fi
printf '%s\\n' "$@" "<end>"
exec sleep 300
"""
"""An interpreter that tells how an engine was started, and is else the one of the tests."""


@pytest.mark.parametrize("config", ["--config {file}", "--config={file}"])
async def test_what_a_file_of_flags_gives_is_left_to_it(tmp_path: Path, config: str) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("block_size: 32\nport: 8000\n")
    argv, logs = await _started(tmp_path, config.format(file=file))
    assert "--block-size" not in argv
    assert argv[argv.index("--config") + 1] == str(file)
    (overridden,) = [line for line in logs if line["event"] == "engine_config_overridden"]
    assert overridden["flags"] == ["--port"], "the sidecar's own"


async def test_a_file_of_flags_that_cannot_be_read_gives_none_and_it_is_said(
    tmp_path: Path,
) -> None:
    argv, logs = await _started(tmp_path, "--config missing.yaml")
    assert argv[argv.index("--block-size") + 1] == "128"
    assert [line["file"] for line in logs if line["event"] == "engine_config_unreadable"] == [
        "missing.yaml"
    ]


def test_the_models_config_is_read_if_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert read_model_config(str(tmp_path)) == {"model_type": "qwen3"}
    (tmp_path / "config.json").write_text("[")
    assert read_model_config(str(tmp_path)) == {}
    assert read_model_config("Qwen/Qwen3-8B") == {}
    assert read_model_config(None) == {}
