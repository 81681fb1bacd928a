"""How far vLLM has got with starting, read from its log. Pure functions."""

from __future__ import annotations

import re
from enum import StrEnum


class Phase(StrEnum):
    """What vLLM is doing, in the order in which it does it."""

    IMPORTING = "importing"
    STARTING_ENGINE = "starting engine"
    LOADING_WEIGHTS = "loading weights"
    PREPARING = "profiling and compiling"
    WARMING_UP = "warming up"
    STARTING_SERVER = "starting server"
    READY = "ready"


_ORDER = list(Phase)
_SIGNS = (
    (re.compile(r"Application startup complete"), Phase.READY),
    (re.compile(r"init engine \(profile"), Phase.STARTING_SERVER),
    (re.compile(r"KV cache size: "), Phase.WARMING_UP),
    (re.compile(r"Loading weights took|Model loading took"), Phase.PREPARING),
    (re.compile(r"Starting to load model|Loading \S+ checkpoint shards"), Phase.LOADING_WEIGHTS),
    (re.compile(r"Initializing a V1 LLM engine"), Phase.STARTING_ENGINE),
)
_PERCENT = re.compile(r"Loading .*shards:\s+(\d{1,3})%")


def phase_of(line: str) -> Phase | None:
    """The phase that a line of vLLM's log announces, if it announces one."""
    for sign, phase in _SIGNS:
        if sign.search(line):
            return phase
    return None


def percent_of(line: str) -> int | None:
    """Per cent of the weights loaded, if the line says so."""
    found = _PERCENT.search(line)
    return int(found.group(1)) if found else None


class Progress:
    """The furthest phase seen in a log that is read piece by piece."""

    def __init__(self) -> None:
        self.phase = Phase.IMPORTING
        self.percent: int | None = None

    def read(self, line: str) -> bool:
        """Take one line in; True if the phase or the percentage advanced."""
        percent = percent_of(line)
        phase = phase_of(line)
        advanced = False
        if phase is not None and _ORDER.index(phase) > _ORDER.index(self.phase):
            self.phase, self.percent = phase, None
            advanced = True
        if percent is not None and percent > (self.percent if self.percent is not None else -1):
            self.percent = percent
            advanced = True
        return advanced
