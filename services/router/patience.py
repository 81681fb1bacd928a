"""How long a worker may be silent before its leg is given up.

A worker that is gone breaks its connection. One whose engine hangs says nothing, for
as long as it is let.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from kvloop.errors import UnavailableError
from services.router.failures import WORKER_SILENT


@dataclass(frozen=True, slots=True)
class Patience:
    """How long legs wait for their worker."""

    prefill_seconds: float
    """For a prefill leg, apart from the time that its prompt takes."""
    first_chunk_seconds: float
    """For the first chunk of a streamed answer, likewise."""
    next_chunk_seconds: float
    """For each further one."""
    prompt_bytes_per_second: float
    """The slowest pace at which a prompt is computed."""

    def with_prefill(self, body_bytes: int) -> float:
        """Seconds for a prefill leg with a body of that size."""
        return self.prefill_seconds + body_bytes / self.prompt_bytes_per_second

    def with_first_chunk(self, body_bytes: int) -> float:
        """Seconds for the first chunk, whose engine may have to compute the prompt."""
        return self.first_chunk_seconds + body_bytes / self.prompt_bytes_per_second


def silent(worker_id: str, seconds: float) -> UnavailableError:
    """The error of a leg that was given up."""
    return UnavailableError(
        f"worker {worker_id} was silent for {seconds:.0f} s",
        reason=WORKER_SILENT,
        worker_id=worker_id,
    )


class SilenceGuard:
    """Cuts a stream off whose worker is silent for too long.

    One timer per stream, which is not touched as messages come: it looks when the
    last one came, and goes on. The time that the reader takes does not count.

        async with SilenceGuard(worker_id, first_seconds=60, next_seconds=10) as guard:
            async for message in messages:
                guard.heard()
                yield message
                guard.listens()

    Args:
        worker_id: whom to blame.
        first_seconds: for the first message; None: as long as it takes.
        next_seconds: for each further one.

    Raises:
        UnavailableError: at the end of the block, reason WORKER_SILENT.
    """

    def __init__(self, worker_id: str, *, first_seconds: float | None, next_seconds: float) -> None:
        self._worker_id = worker_id
        self._next_seconds = next_seconds
        self._seconds = next_seconds if first_seconds is None else first_seconds
        self._loop = asyncio.get_running_loop()
        self._since = None if first_seconds is None else self._loop.time()
        self._limit = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None

    def heard(self) -> None:
        """A message has come."""
        self._since = None

    def listens(self) -> None:
        """The next message is waited for from now on."""
        self._seconds = self._next_seconds
        self._since = self._loop.time()

    async def __aenter__(self) -> Self:
        await self._limit.__aenter__()
        self._look_again(self._loop.time() + self._seconds)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        try:
            await self._limit.__aexit__(kind, error, traceback)
        except TimeoutError:
            raise silent(self._worker_id, self._seconds) from None

    def _look_again(self, when: float) -> None:
        self._timer = self._loop.call_at(when, self._look)

    def _look(self) -> None:
        now = self._loop.time()
        due = (now if self._since is None else self._since) + self._seconds
        if due <= now:
            self._limit.reschedule(now)
        else:
            self._look_again(due)
