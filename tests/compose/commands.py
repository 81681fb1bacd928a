"""Runs docker and its kin; what fails says so with its output."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence

import pytest


def run(
    command: Sequence[str], *, seconds: float = 180, environment: Mapping[str, str] | None = None
) -> str:
    """Standard output of a command.

    Args:
        command: program and arguments.
        seconds: time that it may take.
        environment: variables on top of this process's.
    """
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        env={**os.environ, **(environment or {})},
    )
    if done.returncode != 0:
        output = (done.stdout + done.stderr)[-4000:]
        pytest.fail(f"{' '.join(command)} ended with {done.returncode}:\n{output}", pytrace=False)
    return done.stdout


def docker(*arguments: str, seconds: float = 180) -> str:
    """Standard output of a docker command, stripped."""
    return run(["docker", *arguments], seconds=seconds).strip()


def succeeds(*command: str) -> bool:
    """Whether a command exists and ends well."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=30, check=False)
    except FileNotFoundError:
        return False
    return done.returncode == 0
