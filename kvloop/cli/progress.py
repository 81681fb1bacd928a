"""Shows how a stack comes up and goes down."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from kvloop.stack import ProcessState, ProcessStatus

_STYLES = {
    ProcessState.READY: "green",
    ProcessState.FAILED: "bold red",
    ProcessState.WAITING: "dim",
    ProcessState.STOPPED: "dim",
}


_BUSY = {ProcessState.WAITING, ProcessState.STARTING, ProcessState.STOPPING}


class ProgressView:
    """One live table on a terminal while anything starts or stops; lines elsewhere.

    Leaving the `with` block takes the table away.

    Args:
        console: where to show it.
        clock: the stack's clock.
    """

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        self._console = console
        self._clock = clock
        self._statuses: dict[str, ProcessStatus] = {}
        self._spinner = Spinner("dots")
        self._live: Live | None = None

    def update(self, status: ProcessStatus) -> None:
        """Take a new status; the stack calls this."""
        before = self._statuses.get(status.name)
        self._statuses[status.name] = status
        if self._console.is_terminal:
            self._show_or_hide()
        elif status.state is not ProcessState.WAITING and (
            before is None or (before.state, before.phase) != (status.state, status.phase)
        ):
            line = f"{status.name}: {_describe(status)} ({self._seconds(status):.0f} s)"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._hide()

    def _show_or_hide(self) -> None:
        if not any(status.state in _BUSY for status in self._statuses.values()):
            self._hide()
        elif self._live is None:
            self._live = Live(get_renderable=self._render, console=self._console, transient=True)
            self._live.start(refresh=True)

    def _hide(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _render(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        for status in tuple(self._statuses.values()):
            busy = status.state in (ProcessState.STARTING, ProcessState.STOPPING)
            waiting = status.state is ProcessState.WAITING
            table.add_row(
                self._spinner if busy else "",
                status.name,
                Text(_describe(status), style=_STYLES.get(status.state, "")),
                "" if waiting else f"{self._seconds(status):.0f} s",
            )
        return table

    def _seconds(self, status: ProcessStatus) -> float:
        """How long the start took, or has taken so far; for an end, how long that takes."""
        if status.state is ProcessState.STARTING:
            return self._clock() - status.started_at
        if status.state is ProcessState.STOPPING:
            return self._clock() - status.changed_at
        return status.changed_at - status.started_at


def _describe(status: ProcessStatus) -> str:
    if status.state is ProcessState.STARTING and status.phase:
        return status.phase
    return status.state.value
