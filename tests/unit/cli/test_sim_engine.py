"""`kvloop sim-engine` is the module `services.sim`, flags and all."""

from __future__ import annotations

import subprocess
import sys


def test_help_is_that_of_the_simulated_engine() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from kvloop.cli import main; main()", "sim-engine", "--help"],
        capture_output=True,
        text=True,
        timeout=25,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "--engines" in done.stdout
    assert "--preset" in done.stdout
