"""A Docker daemon: the one that runs, or one of our own for the time of the tests."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.compose.commands import succeeds
from tests.compose.waiting import until

DATA_ROOT = Path(os.environ.get("KVLOOP_DOCKER_ROOT", "/var/lib/kvloop-docker"))
"""Where our own daemon keeps images, so that the next run finds them built."""
_START_SECONDS = 180.0
_STOP_SECONDS = 60.0


@contextmanager
def running_daemon() -> Iterator[None]:
    """Make `docker` commands work while the block runs."""
    if succeeds("docker", "info"):
        yield
        return
    if shutil.which("dockerd") is None:
        pytest.fail("there is no Docker here: install docker.io and docker-compose", pytrace=False)
    log = DATA_ROOT.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["dockerd", "--data-root", str(DATA_ROOT)],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        until(lambda: process.poll() is not None or succeeds("docker", "info"), _START_SECONDS)
        if not succeeds("docker", "info"):
            pytest.fail(
                "dockerd does not start here; it needs root, and a kernel with overlay file "
                f"systems, bridges and iptables. The end of {log}:\n{log.read_text()[-3000:]}",
                pytrace=False,
            )
        yield
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
