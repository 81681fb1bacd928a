"""The bare protocol's engines have the flags of those that sidecars start, and no kvloop code."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic_settings import CliApp

from bench.gpu.bare_engines import bare_start
from bench.gpu.engines import EnginePair, engine_pairs
from bench.gpu.models import model_config
from kvloop.stack.plan import EntryPoints, ProcessSpec, plan_stack
from kvloop.stack.ports import PortPool
from services.worker import launcher
from services.worker.engine_command import Role
from services.worker.engine_events import EVENTS_SOCKET
from services.worker.kv_layout import MODEL_RUNNER
from services.worker.settings import WorkerSettings

ROLES: tuple[Role, ...] = ("prefill", "decode")
CONNECTOR = "--kv-transfer-config"


@dataclass
class Start:
    """A command line, and all of the environment."""

    argv: Sequence[str]
    environment: Mapping[str, str]

    @property
    def connector(self) -> dict[str, Any]:
        """The connector's configuration."""
        found: dict[str, Any] = json.loads(self.last(CONNECTOR))
        return found

    def last(self, flag: str) -> str:
        """The value of a flag that vLLM takes, which is the last one."""
        return self.argv[len(self.argv) - list(self.argv)[::-1].index(flag)]

    def without(self, flag: str) -> list[str]:
        """The command line without a flag."""
        argv = list(self.argv)
        while flag in argv:
            at = argv.index(flag)
            del argv[at : at + 2]
        return argv


@pytest.fixture
def pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, EnginePair]:
    """As on a machine that setup.sh prepared: vLLM 0.25.1 and the folder of the shape."""
    model = tmp_path / "models" / "q8"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(model_config("q8")))
    engine_python = tmp_path / "engine-python"
    engine_python.write_text("#!/bin/sh\necho 0.25.1\n")
    engine_python.chmod(0o755)
    monkeypatch.setenv("KVLOOP_GPU_DIR", str(tmp_path))
    for name in (MODEL_RUNNER, "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    return engine_pairs()


def _spec(pair: EnginePair, role: Role, run_dir: Path) -> ProcessSpec:
    with PortPool() as ports:
        plan = plan_stack(pair.stack_settings(run_dir), EntryPoints(), ports, run_dir)
    (spec,) = (worker for worker in plan.workers if worker.name == f"{role}-0")
    return spec


def _bare(pair: EnginePair, role: Role, run_dir: Path) -> Start:
    with launcher.import_root(pair.engine_python) as root:
        start = bare_start(_spec(pair, role, run_dir), root)
    return Start(start.argv, start.environment)


async def _kvloop(
    pair: EnginePair, role: Role, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> Start:
    """What the sidecar of kvloop's stack does start."""
    spec, started = _spec(pair, role, run_dir), []

    @asynccontextmanager
    async def start_engine(
        argv: Sequence[str], environment: Mapping[str, str], *_: object, **__: object
    ) -> AsyncIterator[None]:
        started.append(Start(argv, environment))
        yield

    with monkeypatch.context() as patch:
        patch.setattr(launcher, "start_engine", start_engine)
        for name, text in spec.env.items():
            patch.setenv(name, text)
        flags = list(spec.argv[len(EntryPoints().worker) :])
        async with launcher.launch(CliApp.run(WorkerSettings, cli_args=flags)):
            pass
    (start,) = started
    return start


@pytest.mark.parametrize("role", ROLES)
async def test_nothing_but_connector_and_plugins_tells_bare_engines_from_kvloops(
    pairs: dict[str, EnginePair], role: Role, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = await _kvloop(pairs["q8"], role, tmp_path, monkeypatch)
    bare = _bare(pairs["q8-bare"], role, tmp_path)
    assert bare.without(CONNECTOR) == ours.without(CONNECTOR)
    shared = {name: text for name, text in ours.environment.items() if name != EVENTS_SOCKET}
    assert bare.environment == {**shared, "VLLM_PLUGINS": "none"}
    assert ours.environment.get("VLLM_PLUGINS") is None
    extra = ours.connector["kv_connector_extra_config"]
    assert bare.connector == {
        **{name: v for name, v in ours.connector.items() if name != "kv_connector_module_path"},
        "kv_connector": "NixlConnector",
        "kv_connector_extra_config": {
            name: value for name, value in extra.items() if name != "kvloop_pin_lease"
        },
    }


@pytest.mark.parametrize("role", ROLES)
def test_bare_engines_have_kvloops_layout_none_of_its_code_and_hand_over_both_ways(
    pairs: dict[str, EnginePair], role: Role, tmp_path: Path
) -> None:
    bare = _bare(pairs["q8-bare"], role, tmp_path)
    assert bare.last("--block-size") == "64"
    assert bare.environment[MODEL_RUNNER] == "0"
    assert bare.environment["VLLM_PLUGINS"] == "none"
    assert EVENTS_SOCKET not in bare.environment
    assert "services." not in bare.last(CONNECTOR)
    assert "kvloop" not in bare.last(CONNECTOR)
    extra = bare.connector["kv_connector_extra_config"]
    assert extra["enable_cross_layers_blocks"] is True
    assert extra["bidirectional_kv_xfer"] is True


@pytest.mark.parametrize("role", ROLES)
def test_stock_engines_differ_from_those_by_blocks_of_16_alone(
    pairs: dict[str, EnginePair], role: Role, tmp_path: Path
) -> None:
    bare = _bare(pairs["q8-bare"], role, tmp_path)
    stock = _bare(pairs["q8-stock"], role, tmp_path)
    assert stock.last("--block-size") == "16"
    assert stock.connector == bare.connector
    assert stock.without("--block-size") == bare.without("--block-size")
    assert stock.environment == bare.environment
