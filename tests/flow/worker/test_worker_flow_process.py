"""`python -m services.worker` starts its engine, reports, and takes it along at the end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import services
from tests.free_ports import held_port
from tests.unit.worker.fake_kvmeta import FakeKvmeta, fake_kvmeta
from tests.unit.worker.fakes import until

ROOT = Path(services.__path__[0]).parent


class _Sidecar:
    """A sidecar process and what it wrote."""

    def __init__(self, process: asyncio.subprocess.Process, logs: Path) -> None:
        self.process = process
        self._logs = logs

    def events(self) -> list[dict[str, Any]]:
        *lines, _ = self.text().split("\n")
        return [json.loads(line) for line in lines if line.startswith("{")]

    def named(self, event: str) -> list[dict[str, Any]]:
        return [entry for entry in self.events() if entry["event"] == event]

    def text(self) -> str:
        return (self._logs / "sidecar.log").read_text()

    def engine_pids(self) -> list[int]:
        log = self._logs / "engine.log"
        lines = log.read_text().splitlines() if log.exists() else []
        found = [line.split()[1:] for line in lines if line.startswith("pids ")]
        return [int(pid) for pid in found[-1]] if found else []


@pytest.fixture
async def kvmeta() -> AsyncIterator[FakeKvmeta]:
    async with fake_kvmeta() as fake:
        yield fake


@asynccontextmanager
async def _sidecar(tmp_path: Path, kvmeta: FakeKvmeta, *flags: str) -> AsyncIterator[_Sidecar]:
    """Run a sidecar whose `vllm` is our program."""
    _shadow_vllm(tmp_path)
    argv = [
        "--role=decode",
        "--worker-id=decode-0",
        "--listen=127.0.0.1:0",
        f"--kvmeta={kvmeta.address}",
        "--model=tiny",
        f"--engine-port={held_port()}",
        f"--engine-log={tmp_path / 'engine.log'}",
        f"--events-socket={tmp_path / 'e.sock'}",
        "--platform=cpu",
        "--log-json",
        "--grace-seconds=1",
        "--engine-stop-grace-seconds=5",
        *flags,
    ]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    with _open(tmp_path / "sidecar.log") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.worker", *argv, stderr=log, env=environment
        )
    try:
        yield _Sidecar(process, tmp_path)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def _shadow_vllm(directory: Path) -> None:
    package = directory / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for parent in (package, package.parent, package.parent.parent):
        (parent / "__init__.py").touch()
    (package / "api_server.py").write_text(
        "import sys\nfrom tests.flow.worker.launched_engine import main\nsys.exit(main())\n"
    )


def _open(path: Path) -> Any:
    return path.open("wb")


def _alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


async def test_it_starts_the_engine_registers_and_stops_both(
    tmp_path: Path, kvmeta: FakeKvmeta
) -> None:
    async with _sidecar(tmp_path, kvmeta) as sidecar:
        await until(lambda: sidecar.named("worker_registered"), 60)
        pids = sidecar.engine_pids()
        assert len(_alive(pids)) == 2
        sidecar.process.terminate()
        assert await sidecar.process.wait() == 0
    assert _alive(pids) == []
    assert kvmeta.ended == ["lease-1"]
    names = [entry["event"] for entry in sidecar.events()]
    order = ["engine_starting", "engine_ready", "worker_serving", "worker_stopping"]
    assert [name for name in names if name in order] == order


async def test_kill_9_leaves_no_engine_behind(tmp_path: Path, kvmeta: FakeKvmeta) -> None:
    async with _sidecar(tmp_path, kvmeta) as sidecar:
        await until(lambda: sidecar.named("worker_registered"), 60)
        pids = sidecar.engine_pids()
        sidecar.process.kill()
        await sidecar.process.wait()
        await until(lambda: not _alive(pids))


async def test_an_engine_that_dies_ends_the_sidecar_with_the_reason(
    tmp_path: Path, kvmeta: FakeKvmeta
) -> None:
    async with _sidecar(tmp_path, kvmeta) as sidecar:
        await until(lambda: sidecar.named("worker_registered"), 60)
        pids = sidecar.engine_pids()
        os.kill(pids[0], signal.SIGKILL)
        assert await sidecar.process.wait() == 1
    (failure,) = sidecar.named("worker_failed")
    assert failure["reason"] == "ENGINE_DIED"
    assert "exit status 137" in failure["error"]
    assert "Starting to load model" in failure["error"]
    assert kvmeta.ended == ["lease-1"]
    assert _alive(pids) == []


async def test_an_engine_that_cannot_load_is_reported_and_never_registered(
    tmp_path: Path, kvmeta: FakeKvmeta
) -> None:
    async with _sidecar(tmp_path, kvmeta, "--engine-args=--broken") as sidecar:
        assert await sidecar.process.wait() == 1
    (failure,) = sidecar.named("worker_failed")
    assert "broken weights" in failure["error"]
    assert kvmeta.registered == []
    assert _alive(sidecar.engine_pids()) == []


async def test_it_can_be_stopped_while_the_engine_is_loading(
    tmp_path: Path, kvmeta: FakeKvmeta
) -> None:
    async with _sidecar(tmp_path, kvmeta, "--engine-args=--hang") as sidecar:
        await until(sidecar.engine_pids, 60)
        pids = sidecar.engine_pids()
        await until(lambda: sidecar.named("engine_loading"), 60)
        sidecar.process.send_signal(signal.SIGINT)
        assert await sidecar.process.wait() == 0
    assert _alive(pids) == []


async def test_wrong_settings_are_explained(tmp_path: Path, kvmeta: FakeKvmeta) -> None:
    async with _sidecar(tmp_path, kvmeta, "--role=decode", "--listen=0.0.0.0:1") as sidecar:
        assert await sidecar.process.wait() == 2
    assert "--advertise" in sidecar.text()
    assert "Traceback" not in sidecar.text()
