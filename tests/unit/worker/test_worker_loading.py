"""vLLM's progress, read from lines that it really writes."""

from __future__ import annotations

import pytest

from services.worker.loading import Phase, Progress, percent_of, phase_of

_PREFIX = "(EngineCore_DP0 pid=7) INFO 11-29 14:00:00 [core.py:134] "


@pytest.mark.parametrize(
    ("line", "phase"),
    [
        ("Initializing a V1 LLM engine (v0.32.0) with config: x", Phase.STARTING_ENGINE),
        ("Starting to load model /models/tiny...", Phase.LOADING_WEIGHTS),
        ("Loading safetensors checkpoint shards:   0% Completed | 0/4", Phase.LOADING_WEIGHTS),
        ("Loading weights took 0.04 seconds", Phase.PREPARING),
        ("Model loading took 0.02 GiB memory and 0.6 seconds", Phase.PREPARING),
        ("GPU KV cache size: 524,288 tokens, Maximum concurrency", Phase.WARMING_UP),
        ("CPU KV cache size: 524,288 tokens", Phase.WARMING_UP),
        ("init engine (profile, create kv cache, warmup model) took 2.1 s", Phase.STARTING_SERVER),
        ("Application startup complete.", Phase.READY),
        ("Using max model len 16384", None),
        ("", None),
    ],
)
def test_lines_announce_phases(line: str, phase: Phase | None) -> None:
    assert phase_of(_PREFIX + line) is phase


def test_the_share_of_weights_loaded() -> None:
    assert percent_of("Loading safetensors checkpoint shards:  50% Completed | 2/4") == 50
    assert percent_of("Loading weights took 3 s") is None


def test_progress_only_goes_forward() -> None:
    progress = Progress()
    assert progress.phase == "importing"
    assert progress.read("Starting to load model x")
    assert not progress.read("Initializing a V1 LLM engine")
    assert progress.phase == "loading weights"
    assert progress.read("Loading safetensors checkpoint shards:  0% Completed | 0/4")
    assert progress.read("Loading safetensors checkpoint shards:  50% Completed | 2/4")
    assert not progress.read("Loading safetensors checkpoint shards:  50% Completed | 2/4")
    assert progress.percent == 50
    assert progress.read("Application startup complete")
    assert progress.phase == "ready"
    assert not progress.read("something else")
