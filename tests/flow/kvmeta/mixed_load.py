"""Turns of many conversations, with all that may happen to a turn."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from random import Random

from tests.flow.kvmeta.journal import Journal
from tests.flow.kvmeta.journal_client import JournalClient
from tests.flow.kvmeta.ledger_spec import (
    Answer,
    Commit,
    End,
    Evict,
    Extend,
    Given,
    Missed,
    Operation,
    Read,
    Renew,
    Return,
    Take,
)
from tests.flow.kvmeta.replicas import Replica

CLIENTS_PER_CONVERSATION = 2
"""So that turns of one conversation overlap and race."""


async def run_mixed_load(
    replicas: Sequence[Replica], journal: Journal, names: Sequence[str], stop: asyncio.Event
) -> None:
    """Hold these conversations until told to stop; calls under way are finished."""
    async with asyncio.TaskGroup() as tasks:
        for number, name in enumerate(names):
            serial = itertools.count()
            for client in range(CLIENTS_PER_CONVERSATION):
                rng = Random(f"{number}-{client}")
                turns = Turns(JournalClient(replicas, journal, rng), name, serial, rng)
                tasks.create_task(turns.run(stop))


class Turns:
    """One client's part in one conversation.

    Args:
        client: makes its calls.
        name: the conversation.
        serial: numbers its turns, over all of its clients.
        rng: makes the choices.
    """

    def __init__(
        self, client: JournalClient, name: str, serial: Iterator[int], rng: Random
    ) -> None:
        self._client = client
        self._name = name
        self._serial = serial
        self._rng = rng
        self._committed = ""
        """The turn whose pin D's sidecar renews."""
        self._extension = 0
        """By how many seconds the engine's deadline was moved."""

    async def run(self, stop: asyncio.Event) -> None:
        """Turn after turn, and now and then another call."""
        while not stop.is_set():
            dice = self._rng.random()
            if dice < 0.05:
                await self._ask(Extend(self._rng.randrange(100, 400)))
            elif dice < 0.1:
                await self._ask(End())
            elif dice < 0.2:
                await self._ask(Read())
            elif dice < 0.35 and self._committed:
                self._extension += 10
                await self._ask(Renew(self._committed, self._extension))
            elif dice < 0.4 and self._committed:
                await self._ask(Evict(self._committed))
            else:
                await self._turn(f"{self._name}/{next(self._serial)}")

    async def _turn(self, request: str) -> None:
        taken, handle_id = await self._ask(Take(request))
        # Without an answer the turn goes on and has no number, as in a router.
        number = taken.turn if isinstance(taken, Given | Missed) else 0
        if isinstance(taken, Given) and self._rng.random() < 0.2:
            await self._ask(Return(taken.handle, request), handle_id)
        if self._rng.random() < 0.8:  # else the worker dies before it commits
            self._committed, self._extension = request, 0
            await self._ask(Commit(request, number))

    async def _ask(self, operation: Operation, handle_id: str = "") -> tuple[Answer | None, str]:
        """A call that is repeated now and then if its answer was lost."""
        answer, found_id = await self._client.ask(self._name, operation, handle_id)
        if answer is None and self._rng.random() < 0.5:
            return await self._client.ask(self._name, operation, handle_id)
        return answer, found_id
