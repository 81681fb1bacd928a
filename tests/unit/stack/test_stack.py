"""The supervisor, with fake services as its processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvloop.stack import (
    EntryPoints,
    ProcessDiedError,
    ProcessNotReadyError,
    ProcessState,
    ProcessStatus,
    Stack,
    StackSettings,
    WorkerSettings,
)

FAKE = str(Path(__file__).with_name("fake_service.py"))
ENTRY_POINTS = EntryPoints(
    kvmeta=(sys.executable, FAKE, "kvmeta"),
    router=(sys.executable, FAKE, "router"),
    worker=(sys.executable, FAKE, "worker"),
)


pytestmark = pytest.mark.timeout(120)  # interpreters start, on machines that are busy

_TEST_ID = f"KVLOOP_TEST_ID={os.getpid()}"
"""In the environment of every process that these tests start."""


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Temporary run folders land where the test can see them; no process stays."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv(*_TEST_ID.split("="))
    assert _processes() == set()
    yield
    assert _processes() == set()


def _processes() -> set[int]:
    """Processes of this machine that these tests have started, directly or not."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            environment = (entry / "environ").read_bytes() if entry.name.isdecimal() else b""
        except OSError:
            continue
        if _TEST_ID.encode() in environment.split(b"\0"):
            found.add(int(entry.name))
    return found - {os.getpid()}


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir())


def _settings(*, prefill_args: tuple[str, ...] = (), **options: Any) -> StackSettings:
    return StackSettings(
        model="/models/tiny",
        workers=(
            WorkerSettings(role="prefill", args=prefill_args),
            WorkerSettings(role="decode"),
        ),
        **options,
    )


async def test_everything_comes_up_in_order_and_nothing_stays_behind(tmp_path: Path) -> None:
    changes: list[ProcessStatus] = []
    async with Stack(_settings(), entry_points=ENTRY_POINTS, on_change=changes.append) as stack:
        assert stack.names == ("kvmeta", "router", "prefill-0", "decode-0")
        assert all(stack.pid(name) is not None for name in stack.names)
        assert stack.run_dir.parent == tmp_path
        assert "serving" in stack.log_path("decode-0").read_text()
    ready = [change.name for change in changes if change.state is ProcessState.READY]
    stopped = [change.name for change in changes if change.state is ProcessState.STOPPED]
    assert ready[0] == "kvmeta"
    assert set(ready) == set(stopped) == set(stack.names)
    assert (stopped[0], stopped[-1]) == ("router", "kvmeta")
    assert _entries(tmp_path) == []


async def test_given_run_folder_is_kept(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    async with Stack(_settings(run_dir=run_dir), entry_points=ENTRY_POINTS):
        pass
    assert (run_dir / "kvmeta.log").exists()


async def test_process_that_dies_at_start_is_told_with_its_last_lines(tmp_path: Path) -> None:
    with pytest.raises(ProcessDiedError) as caught:
        async with Stack(_settings(prefill_args=("--fake-exit",)), entry_points=ENTRY_POINTS):
            pytest.fail("a stack with a dead worker must not be entered")
    assert str(caught.value) == "prefill-0 exited 3"
    assert caught.value.last_lines == ("engine_failed", "Traceback", "MemoryError: no room")
    (kept,) = _entries(tmp_path)
    assert (kept / "prefill-0.log").exists()


async def test_process_that_never_gets_ready_is_given_up_and_shows_its_phase() -> None:
    now = 0.0

    def pass_the_deadline(status: ProcessStatus) -> None:
        nonlocal now
        if status.phase == "loading weights":
            now = 1000.0

    stack = Stack(
        _settings(prefill_args=("--fake-not-ready",), start_timeout_seconds=300),
        entry_points=ENTRY_POINTS,
        on_change=pass_the_deadline,
        clock=lambda: now,
    )
    with pytest.raises(ProcessNotReadyError, match="prefill-0 was not ready after 300 s") as caught:
        await stack.__aenter__()
    assert caught.value.last_lines == ("engine_loading phase=loading weights",)


async def test_watch_reports_a_death_that_nobody_asked_for() -> None:
    async with Stack(_settings(), entry_points=ENTRY_POINTS) as stack:
        pid = stack.pid("decode-0")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ProcessDiedError, match="decode-0 was ended by signal 9"):
            await stack.watch()


async def test_killed_process_starts_again_and_is_not_reported() -> None:
    async with Stack(_settings(), entry_points=ENTRY_POINTS) as stack:
        before = stack.pid("kvmeta")
        stack.kill("kvmeta", signal.SIGKILL)
        await stack.start("kvmeta")
        after = stack.pid("kvmeta")
        assert after is not None
        assert after != before
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await stack.watch()


async def test_what_a_killed_process_left_running_is_cleared_away() -> None:
    settings = _settings(prefill_args=("--fake-engine",))
    async with Stack(settings, entry_points=ENTRY_POINTS) as stack:
        before = _processes()
        stack.kill("prefill-0", signal.SIGKILL)
        await stack.start("prefill-0")
        gone = before - _processes()
        assert len(gone) == 2, "the sidecar, and the engine that it left behind"


async def test_process_that_ignores_sigterm_is_killed() -> None:
    settings = _settings(prefill_args=("--fake-stubborn",), stop_timeout_seconds=0.5)
    async with Stack(settings, entry_points=ENTRY_POINTS) as stack:
        assert stack.pid("prefill-0") is not None
    assert stack.pid("prefill-0") is None


async def test_kill_all_ends_everything_at_once() -> None:
    async with Stack(_settings(), entry_points=ENTRY_POINTS) as stack:
        stack.kill_all()
        async with asyncio.timeout(20):
            await stack.stop("router")
        assert stack.pid("router") is None


async def test_cancelling_the_start_stops_what_was_started(tmp_path: Path) -> None:
    started = asyncio.Event()

    def note(status: ProcessStatus) -> None:
        if status.phase == "loading weights":
            started.set()

    settings = _settings(prefill_args=("--fake-not-ready",))
    stack = Stack(settings, entry_points=ENTRY_POINTS, on_change=note)
    task = asyncio.ensure_future(stack.__aenter__())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert _entries(tmp_path) == []


async def test_stack_ends_with_a_supervisor_that_was_killed(tmp_path: Path) -> None:
    script = f"""
import asyncio
from kvloop.stack import EntryPoints, Stack, StackSettings
fake = {FAKE!r}
points = EntryPoints(*(({sys.executable!r}, fake, name) for name in ("kvmeta", "router", "worker")))
async def main():
    async with Stack(StackSettings(model="tiny"), entry_points=points):
        print("up", flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script),
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"up\n"
    assert len(_processes()) == 1 + 4
    process.kill()
    await process.wait()
    async with asyncio.timeout(25):
        while True:
            if not _processes():
                break
            await asyncio.sleep(0.05)
