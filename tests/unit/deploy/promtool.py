"""Prometheus' own checker, which comes with the package prometheus."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run promtool; skips the test where there is none, unless it is required."""
    found = shutil.which("promtool")
    if found is None:
        if os.environ.get("KVLOOP_REQUIRE_PROMTOOL"):
            pytest.fail("promtool is missing; it comes with the package prometheus")
        pytest.skip("promtool is not installed; it comes with the package prometheus")
    return subprocess.run(
        [found, *arguments], capture_output=True, text=True, timeout=25, check=False
    )
