"""The model that a local stack serves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from kvloop.errors import KvloopError


class ModelMakerError(KvloopError):
    """The tiny model could not be made."""

    default_reason = "MODEL_MAKER"


def resolve_model(model: str) -> str:
    """The model asked for; without one, a tiny model made for the occasion.

    Raises:
        ModelMakerError: it could not be made.
    """
    if model:
        return model
    folder = _cache_folder() / "tiny"
    # A process of its own: the maker belongs to the worker and loads numpy.
    made = subprocess.run(
        [sys.executable, "-m", "services.worker.tiny_model", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode != 0:
        last = made.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise ModelMakerError(f"cannot make the tiny model in {folder}: {last[0]}")
    return str(folder)


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvloop"
