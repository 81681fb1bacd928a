"""What tests share that need a machine to themselves."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator

import pytest


@pytest.fixture
def turn_to_soak(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Held by one test at a time, of all workers of this run.

    A soak is ten processes that start at once and much load: two at the same time
    would tell more about the machine than about kvloop.
    """
    # Each worker of pytest-xdist has a folder of its own in that of the run.
    with (tmp_path_factory.getbasetemp().parent / "soak.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
