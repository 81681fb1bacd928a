"""No process of an engine outlives its sidecar, however that ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from services.worker.engine_process import EngineProcess, start_engine
from tests.unit.worker import fake_engine_program
from tests.unit.worker.fakes import until

pytestmark = pytest.mark.timeout(90)  # processes take their time to start

PROGRAM = [sys.executable, fake_engine_program.__file__]
ENVIRONMENT = {**os.environ, "KVLOOP_TEST": "passed on"}

_KEEPER = """
import asyncio, os, sys
from pathlib import Path
from services.worker.engine_process import start_engine

async def main():
    async with start_engine(
        sys.argv[2:], dict(os.environ), Path(sys.argv[1]), stop_grace_seconds=0.2
    ):
        await asyncio.sleep(300)

asyncio.run(main())
"""


def _alive(pids: Sequence[int]) -> list[int]:
    return [pid for pid in pids if _state(pid) not in (None, "Z")]


def _state(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


def _pids(log: Path) -> list[int]:
    if not log.exists():
        return []
    for line in log.read_text().splitlines():
        if line.startswith("{"):
            pids: list[int] = json.loads(line)["pids"]
            return pids
    return []


async def _started(log: Path) -> list[int]:
    await until(lambda: _pids(log), 60)
    pids = _pids(log)
    assert len(_alive(pids)) == 3
    return pids


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "engine.log"


async def test_all_processes_end_with_the_block(log: Path) -> None:
    async with start_engine(PROGRAM, ENVIRONMENT, log, stop_grace_seconds=20) as process:
        pids = await _started(log)
        assert process.exit_status is None
        assert os.getsid(pids[0]) != os.getsid(0)  # out of reach of the terminal's Ctrl-C
        ending_at = time.monotonic()
    assert _alive(pids) == []
    assert time.monotonic() - ending_at < 10  # they obeyed SIGTERM


async def test_processes_that_ignore_sigterm_are_killed(log: Path) -> None:
    command = [*PROGRAM, "--ignore-term"]
    async with start_engine(command, ENVIRONMENT, log, stop_grace_seconds=0.2):
        pids = await _started(log)
    assert _alive(pids) == []


async def test_an_engine_that_ends_takes_its_processes_along(log: Path) -> None:
    command = [*PROGRAM, "--exit", "3"]
    async with start_engine(command, ENVIRONMENT, log, stop_grace_seconds=1) as process:
        assert await process.wait() == 3
        assert process.exit_status == 3
        assert _alive(_pids(log)) == []


async def test_a_signal_shows_in_the_exit_status(log: Path) -> None:
    async with start_engine(PROGRAM, ENVIRONMENT, log, stop_grace_seconds=1) as process:
        pids = await _started(log)
        os.kill(pids[0], signal.SIGKILL)
        assert await process.wait() == 128 + signal.SIGKILL
        assert _alive(pids) == []


async def test_kill_9_of_the_keeper_leaves_nothing_behind(log: Path) -> None:
    keeper = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _KEEPER, str(log), *PROGRAM, "--ignore-term"
    )
    pids = await _started(log)
    keeper.kill()
    await keeper.wait()
    await until(lambda: not _alive(pids))


async def test_a_command_that_does_not_exist_says_so_in_the_log(log: Path) -> None:
    command = ["/no/such/python", "-m", "vllm"]
    async with start_engine(command, ENVIRONMENT, log, stop_grace_seconds=1) as process:
        assert await process.wait() == 1
        assert "/no/such/python" in process.last_lines()


async def test_the_log_is_kept_and_read_from_where_this_life_began(log: Path) -> None:
    _append(log, "an earlier life\n")
    lines: list[str] = []

    def seen(process: EngineProcess) -> list[str]:
        lines.extend(process.new_lines())
        return lines

    async with start_engine(PROGRAM, ENVIRONMENT, log, stop_grace_seconds=1) as process:
        await until(lambda: "loading 20%" in seen(process), 60)
        assert "an earlier life" not in lines
        assert "KVLOOP_TEST=passed on" in lines
        assert "loading 10%" in lines
        assert "an earlier life" in process.last_lines()


def _append(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(text)
