"""The live feed of the status page: each part is sent when it has changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import msgspec

from kvloop.errors import KvloopError
from services.router.candidates import Candidate
from services.router.status import views
from services.router.status.fleet import Fleet
from services.router.status.journal import TurnJournal

MAX_CONVERSATIONS = 500
MAX_TURNS = 100

Sleep = Callable[[float], Any]


class StatusFeed:
    """Makes the parts of the page.

    Args:
        fleet: kvmeta's view.
        journal: this router's turns.
        seen: this router's view of workers, by id.
        interval_seconds: pause between two looks.
        leaving: whether the router is about to leave, so that streams end and
            viewers come back to another.
        sleep: waits; for tests.
    """

    def __init__(
        self,
        fleet: Fleet,
        journal: TurnJournal,
        seen: Callable[[], Mapping[str, Candidate]],
        *,
        interval_seconds: float,
        leaving: Callable[[], bool] = lambda: False,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._fleet = fleet
        self._journal = journal
        self._seen = seen
        self._interval_seconds = interval_seconds
        self._leaving = leaving
        self._sleep = sleep

    async def events(self, tenant: str) -> AsyncIterator[bytes]:
        """Server-sent events until the router leaves, one look after the other.

        A look at which nothing has changed sends a comment, so that both ends
        notice a connection that is gone.
        """
        sent: dict[str, bytes] = {}
        while not self._leaving():
            fresh = False
            async for name, data in self._look(tenant):
                if sent.get(name) != data:
                    sent[name] = data
                    fresh = True
                    yield b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
            if not fresh:
                yield b": nothing new\n\n"
            await self._sleep(self._interval_seconds)

    async def _look(self, tenant: str) -> AsyncIterator[tuple[str, bytes]]:
        yield "turns", _json(views.turns(self._journal.turns(tenant, MAX_TURNS)))
        yield "figures", _json(views.figures(self._journal.figures(tenant)))
        seen = self._seen()
        try:
            registered = await self._fleet.workers()
            found = await self._fleet.conversations(tenant, MAX_CONVERSATIONS)
        except KvloopError as error:
            yield "workers", _json(views.seen_only(seen))
            yield "ledger", _json({"reachable": False, "reason": error.reason})
            return
        yield "workers", _json(views.workers(registered, seen))
        yield "conversations", _json(views.conversations(found))
        yield "ledger", _json({"reachable": True, "reason": ""})


def _json(part: object) -> bytes:
    return msgspec.json.encode(part)
