"""`kvloop up` as people use it: a process of its own, and Ctrl-C."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from kvloop.cli.local_model import ModelMakerError, resolve_model
from kvloop.cli.progress import ProgressView
from kvloop.stack import ProcessState, ProcessStatus

pytestmark = pytest.mark.timeout(120)  # interpreters start, on machines that are busy

FAKE = Path(__file__).parent.parent / "stack" / "fake_service.py"
SCRIPT = """
import asyncio, sys
from rich.console import Console
from kvloop.cli.exits import explain, exit_status
from kvloop.cli.up import run_stack
from kvloop.errors import KvloopError
from kvloop.stack import EntryPoints, StackSettings, WorkerSettings
fake, *args = sys.argv[1:]
points = EntryPoints(*((sys.executable, fake, name) for name in ("kvmeta", "router", "worker")))
workers = (WorkerSettings(role="prefill", args=tuple(args)), WorkerSettings(role="decode"))
settings = StackSettings(model="/models/tiny", workers=workers, tls="--fake-tls" in args)
try:
    sys.exit(asyncio.run(run_stack(settings, points, Console())))
except KvloopError as error:
    print(explain(error))
    sys.exit(exit_status(error))
"""


class Up:
    """A running `kvloop up` whose services are fakes."""

    def __init__(self, tmp_path: Path, *worker_args: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(FAKE), *worker_args],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"},
        )
        self.lines: list[str] = []

    def read_until(self, text: str) -> None:
        """Read output up to a line that holds the text."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if text in line:
                return
        pytest.fail(f"ended without {text!r}: {self.lines}")

    def finish(self) -> int:
        """Read the rest; returns the exit status."""
        rest, _ = self.process.communicate(timeout=60)
        self.lines += rest.splitlines()
        return self.process.returncode


def test_one_ctrl_c_stops_everything_and_leaves_nothing_behind(tmp_path: Path) -> None:
    up = Up(tmp_path)
    up.read_until("Ctrl-C stops everything")
    assert any(line.startswith("decode-0: ready") for line in up.lines)
    assert any(line.startswith("kvloop serves 'tiny'") for line in up.lines)
    assert any("kvloop chat" in line for line in up.lines)
    up.process.send_signal(signal.SIGINT)
    assert up.finish() == 0
    assert [line.split(":")[0] for line in up.lines if "stopped" in line][-1] == "kvmeta"
    assert list(tmp_path.iterdir()) == []


def test_with_tls_it_says_how_to_be_called(tmp_path: Path) -> None:
    up = Up(tmp_path, "--fake-tls")
    up.read_until("Ctrl-C stops everything")
    lines = [line.strip() for line in up.lines]
    exports = dict(line.split("=") for line in lines if line.startswith("export KVLOOP_TLS_"))
    assert [Path(path).name for path in exports.values()] == [
        "ca.pem",
        "operator.pem",
        "operator.key",
    ]
    assert all(Path(path).exists() for path in exports.values())
    assert any(line.split()[-1].startswith("https://") for line in lines if "OpenAI" in line)
    up.process.send_signal(signal.SIGINT)
    assert up.finish() == 0
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_it_comes_up_is_an_interruption(tmp_path: Path) -> None:
    up = Up(tmp_path, "--fake-not-ready")
    up.read_until("loading weights")
    up.process.send_signal(signal.SIGINT)
    assert up.finish() == 130
    assert list(tmp_path.iterdir()) == []


def test_second_ctrl_c_kills(tmp_path: Path) -> None:
    up = Up(tmp_path, "--fake-stubborn")
    up.read_until("Ctrl-C stops everything")
    up.process.send_signal(signal.SIGINT)
    up.read_until("prefill-0: stopping")
    up.process.send_signal(signal.SIGINT)
    assert up.finish() == 0


def test_dead_worker_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    up = Up(tmp_path, "--fake-exit")
    assert up.finish() == 1
    text = "\n".join(up.lines)
    (kept,) = tmp_path.iterdir()
    assert f"prefill-0 exited 3; its logs are in {kept} and end with" in text
    assert "MemoryError: no room" in text
    assert "most recent call last" not in text


def test_terminal_shows_a_table_while_something_is_busy() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80)
    with ProgressView(console, clock=lambda: 12.0) as view:
        view.update(ProcessStatus("kvmeta", ProcessState.WAITING))
        view.update(ProcessStatus("kvmeta", ProcessState.STARTING, "loading weights", 2.0, 2.0))
        view.update(ProcessStatus("kvmeta", ProcessState.READY, "", 2.0, 10.0))
    shown = screen.getvalue()
    assert "waiting" in shown
    assert "ready" in shown
    assert "\x1b[?25h" in shown, "the cursor must come back"


def test_pipe_gets_one_line_per_change() -> None:
    screen = io.StringIO()
    with ProgressView(Console(file=screen), clock=lambda: 12.0) as view:
        starting = ProcessStatus("kvmeta", ProcessState.STARTING, "loading [x]", 2.0, 2.0)
        for status in (starting, starting):
            view.update(status)
        view.update(ProcessStatus("kvmeta", ProcessState.READY, "loading [x]", 2.0, 10.0))
    assert screen.getvalue() == "kvmeta: loading [x] (10 s)\nkvmeta: ready (8 s)\n"


def test_given_model_is_taken_as_it_is() -> None:
    assert resolve_model("org/model") == "org/model"


def test_without_a_model_a_tiny_one_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = Path(resolve_model(""))
    assert model == tmp_path / "kvloop" / "tiny"
    assert (model / "model.safetensors").exists()


def test_model_that_cannot_be_made_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kvloop" / "tiny").mkdir(parents=True)
    (tmp_path / "kvloop" / "tiny" / "notes.txt").write_text("mine")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ModelMakerError, match="not empty"):
        resolve_model("")
    assert (tmp_path / "kvloop" / "tiny" / "notes.txt").read_text() == "mine"
