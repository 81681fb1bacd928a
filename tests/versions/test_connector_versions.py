"""What runs inside vLLM works in every version it claims, as far as plain Python shows.

The installed version is always checked. The others need their sources:
`make test-versions` fetches them and names their folder in
KVLOOP_VLLM_SOURCES, one subfolder per version.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCENARIOS = [
    "scenario",
    "scenario_leases",
    "scenario_engine",
    "scenario_detokenizer",
    "scenario_front",
    "scenario_arrivals",
    "scenario_flags",
]


def _sources() -> list[Path | None]:
    folder = os.environ.get("KVLOOP_VLLM_SOURCES")
    if not folder:
        return [None]
    versions = sorted(path for path in Path(folder).iterdir() if (path / "vllm").is_dir())
    assert versions, f"KVLOOP_VLLM_SOURCES={folder} holds no version"
    return [None, *versions]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("source", _sources(), ids=lambda path: path.name if path else "installed")
def test_connector_works_in_this_version(source: Path | None, scenario: str) -> None:
    paths = [str(ROOT)] if source is None else [str(source.resolve()), str(ROOT)]
    done = subprocess.run(
        [sys.executable, "-m", f"tests.versions.{scenario}"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "VLLM_NO_USAGE_STATS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.endswith("ok\n")
