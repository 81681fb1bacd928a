"""Values that live in files and follow them, without a restart."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")

LOOK_SECONDS = 1.0
"""How often files are looked at, at most."""

_Stamp = tuple[tuple[int, int, int], ...]


def _ignore(outcome: Exception | None) -> None:
    """For those who need not know."""


class FileValue(Generic[T]):
    """A value made of files, and made again when one of them changes.

    The files are looked at when the value is asked for, at most once a second.
    Files that cannot be read, or do not fit together, as in the middle of a
    replacement, change nothing; they are tried again. Safe for threads.

    Args:
        paths: the files.
        read: makes the value.
        clock: seconds on a clock that never goes back.
        on_read: told how each later reading went: None, or what was wrong.

    Raises:
        OSError, ValueError: from `read`, the first time.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        read: Callable[[], T],
        *,
        clock: Callable[[], float],
        on_read: Callable[[Exception | None], None] = _ignore,
    ) -> None:
        self._paths = paths
        self._read = read
        self._clock = clock
        self._on_read = on_read
        self._lock = threading.Lock()
        # Looked at before it is read: a change in between is seen the next time.
        self._stamp = self._look()
        self._value = read()
        self._looked_at = clock()

    def current(self) -> T:
        """The value of the files as they are now, or were a second ago."""
        with self._lock:
            if self._clock() - self._looked_at >= LOOK_SECONDS:
                self._renew(force=False)
            return self._value

    def reload(self) -> None:
        """Read the files now, even if they look unchanged."""
        with self._lock:
            self._renew(force=True)

    def _renew(self, *, force: bool) -> None:
        self._looked_at = self._clock()
        try:
            stamp = self._look()
            if stamp == self._stamp and not force:
                return
            value = self._read()
            if self._look() != stamp:
                return  # still being replaced: what was read may be of two minds
        except (OSError, ValueError) as error:
            self._on_read(error)
            return
        self._value, self._stamp = value, stamp
        self._on_read(None)

    def _look(self) -> _Stamp:
        """Changes whenever a file is written or replaced."""
        found = [os.stat(path) for path in self._paths]
        return tuple((one.st_mtime_ns, one.st_size, one.st_ino) for one in found)
