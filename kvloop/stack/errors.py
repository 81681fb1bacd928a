"""What can go wrong with a process of the stack."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvloop.errors import KvloopError


class ProcessDiedError(KvloopError):
    """A process ended by itself.

    Attributes:
        name: name of the process, such as "decode-0".
        log: its log; that of its engine lies beside it.
        last_lines: last lines of its logs, readable.
    """

    default_reason = "PROCESS_DIED"

    def __init__(self, name: str, exit_status: int, log: Path, last_lines: Sequence[str]) -> None:
        how = f"was ended by signal {-exit_status}" if exit_status < 0 else f"exited {exit_status}"
        super().__init__(f"{name} {how}", process=name, exit_status=exit_status)
        self.name = name
        self.log = log
        self.last_lines = tuple(last_lines)


class ProcessNotReadyError(KvloopError):
    """A process did not come up in time.

    Attributes:
        name: name of the process.
        log: its log; that of its engine lies beside it.
        last_lines: last lines of its logs, readable.
    """

    default_reason = "PROCESS_NOT_READY"

    def __init__(self, name: str, why: str, log: Path, last_lines: Sequence[str]) -> None:
        super().__init__(f"{name} {why}", process=name)
        self.name = name
        self.log = log
        self.last_lines = tuple(last_lines)
