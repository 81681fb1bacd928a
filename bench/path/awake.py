"""Keeps processors out of their sleep states for a while, as latency profiles of hosts do."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager

_DEVICE = "/dev/cpu_dma_latency"
"""Linux keeps what is written here for as long as the file is open: the microseconds that a
processor may take to wake up."""


@contextmanager
def processors_awake() -> Iterator[bool]:
    """Let no processor sleep while the block runs; False if this process may not ask for it."""
    try:
        device = os.open(_DEVICE, os.O_WRONLY)
    except OSError:
        yield False
        return
    try:
        os.write(device, struct.pack("i", 0))
        yield True
    finally:
        os.close(device)
