"""What the supervisor reports about each process."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ProcessState(StrEnum):
    """Where a process stands."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """One process at one moment. Times are those of the supervisor's clock.

    Attributes:
        name: name of the process.
        state: where it stands.
        phase: what it is doing, in its own words; may be empty.
        started_at: when it was started.
        changed_at: when it came into this state.
    """

    name: str
    state: ProcessState
    phase: str = ""
    started_at: float = 0.0
    changed_at: float = 0.0
