"""One stack for all tests of a profile.

Collected only for `make test-compose`, which names a profile in KVLOOP_COMPOSE_PROFILE:
building images and running a Docker daemon is nothing to do in passing.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest

from tests.compose.commands import run
from tests.compose.daemon import running_daemon
from tests.compose.stack import BASE_IMAGE, OWN_BASE_IMAGE, ROOT, Stack
from tests.compose.talk import Talker, talker

PROFILE = os.environ.get("KVLOOP_COMPOSE_PROFILE", "")
collect_ignore_glob = [f"test_{profile}_*.py" for profile in ("sim", "cpu") if profile != PROFILE]


@pytest.fixture(scope="session")
def docker_daemon() -> Iterator[None]:
    """A Docker daemon with a base image."""
    with running_daemon():
        if BASE_IMAGE == OWN_BASE_IMAGE:
            run([str(ROOT / "deploy" / "docker" / "make-debian-base"), BASE_IMAGE], seconds=600)
        yield


@contextmanager
def _running(stack: Stack, *services: str, scale: tuple[str, ...]) -> Iterator[Stack]:
    # Both legs run from one image.
    stack.build("kvmeta", "postgres", *(each for each in services if each != stack.decode))
    stack.down()  # what a run that was killed has left
    try:
        stack.up(*services, scale=scale)
        yield stack
    finally:
        stack.down()


@pytest.fixture(scope="session")
def sim_stack(docker_daemon: None) -> Iterator[Stack]:
    """Simulated engines, two of everything that may be two, and Prometheus."""
    with _running(
        Stack("sim", "prefill", "decode"),
        *("router", "front", "prefill", "decode", "prometheus"),
        scale=("router=2", "kvmeta=2", "decode=2"),
    ) as stack:
        yield stack


@pytest.fixture(scope="session")
def cpu_stack(docker_daemon: None) -> Iterator[Stack]:
    """vLLM on the CPU, one engine for each leg."""
    with _running(
        Stack("cpu", "prefill-cpu", "decode-cpu", healthy_seconds=900),
        *("router", "front", "prefill-cpu", "decode-cpu"),
        scale=(),
    ) as stack:
        yield stack


@pytest.fixture
async def sim(sim_stack: Stack) -> AsyncIterator[Talker]:
    """Talks to the simulated engines."""
    async with talker(sim_stack, "sim") as found:
        yield found


@pytest.fixture
async def cpu(cpu_stack: Stack) -> AsyncIterator[Talker]:
    """Talks to vLLM."""
    async with talker(cpu_stack, "tiny") as found:
        yield found
