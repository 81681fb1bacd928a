"""Reading the logs of the stack's processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

_TAIL_BYTES = 64 * 1024
_BOILERPLATE = {"event", "level", "timestamp", "exception", "logger"}


class LogFollower:
    """Gives what was added to a log since the last look, as whole lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def skip(self) -> None:
        """Ignore what is in the log now: it belongs to an earlier life."""
        self._offset = self._path.stat().st_size if self._path.exists() else 0

    def new_lines(self) -> Iterator[str]:
        """Lines that have become complete since the last call."""
        try:
            with self._path.open("rb") as log:
                log.seek(self._offset)
                added = log.read()
        except FileNotFoundError:
            return
        whole = added[: added.rfind(b"\n") + 1]
        self._offset += len(whole)
        yield from whole.decode(errors="replace").splitlines()


def describe_phase(line: str) -> str | None:
    """What a process is doing, from one line of its log; None if it says nothing.

    Services log JSON objects with an `event`; the worker adds a `phase`, and a
    `percent` where there is one, while its engine loads.
    """
    entry = _parse(line)
    if entry is None:
        return None
    phase, percent = entry.get("phase"), entry.get("percent")
    if not isinstance(phase, str):
        return str(entry["event"]).replace("_", " ")
    return phase if percent is None else f"{phase} {percent} %"


def readable(line: str) -> str:
    """One log line for people: JSON entries as `event key=value`, others as they are."""
    entry = _parse(line)
    if entry is None:
        return line
    words = [str(entry["event"])]
    words += [f"{key}={value}" for key, value in entry.items() if key not in _BOILERPLATE]
    text = " ".join(words)
    exception = entry.get("exception")
    return f"{text}\n{exception}" if exception else text


def last_lines(path: Path, count: int) -> list[str]:
    """The last lines of a log, readable; empty if there is no such file."""
    try:
        with path.open("rb") as log:
            log.seek(0, 2)
            log.seek(max(0, log.tell() - _TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    text = "\n".join(readable(line) for line in lines[-count:])
    return text.splitlines()[-count:]


def _parse(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        entry = msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError:
        return None
    return entry if "event" in entry else None
