"""Spreading workers over GPUs."""

from __future__ import annotations

import os
import shutil
import subprocess

_MEMORY_SHARE = 0.9
"""Part of a GPU's memory that vLLM takes by default."""


def detect_gpus() -> tuple[str, ...]:
    """Ids of the NVIDIA GPUs that this process may use; empty without any."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return tuple(filter(None, os.environ["CUDA_VISIBLE_DEVICES"].split(",")))
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    listed = subprocess.run([tool, "-L"], capture_output=True, text=True, check=False)
    count = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    return tuple(map(str, range(count)))


def place(index: int, workers: int, gpus: tuple[str, ...]) -> tuple[dict[str, str], list[str]]:
    """Environment and vLLM flags that put a worker on its GPU.

    Each worker sees all GPUs, its own first: cuda_ipc needs to see the peer to
    read from it. Workers that share a GPU share its memory evenly.

    Args:
        index: number of the worker in the stack, from 0.
        workers: number of workers.
        gpus: ids of the GPUs; empty places nothing.
    """
    if not gpus:
        return {}, []
    first = index % len(gpus)
    env = {"CUDA_VISIBLE_DEVICES": ",".join(gpus[first:] + gpus[:first])}
    sharing = len(range(first, workers, len(gpus)))
    if sharing == 1:
        return env, []
    return env, ["--gpu-memory-utilization", f"{_MEMORY_SHARE / sharing:.2f}"]
