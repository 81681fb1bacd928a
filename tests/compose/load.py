"""A few conversations that go on all the time, and what became of each turn."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tests.compose.stack import Stack
from tests.compose.talk import Conversation, Said, talker

_log = logging.getLogger(__name__)

CLIENTS = ("grpc", "http", "sse")
"""Kinds of clients, each with conversations of its own."""
Turn = Callable[[Conversation], Awaitable[Said]]
_TURNS_OF_A_CONVERSATION = 6
"""After that it starts anew, so that prompts stay short."""
_MOST_SECONDS_TO_WAIT = 180.0


@dataclass
class Tally:
    """What has happened so far. `answered` is by kind of client."""

    answered: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(CLIENTS, 0)))
    pulled: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def more(self, turns: int) -> None:
        """Wait until each kind of client has so many more answers, or a turn has failed."""
        wanted = self.answered + Counter(dict.fromkeys(CLIENTS, turns))
        async with asyncio.timeout(_MOST_SECONDS_TO_WAIT):
            while not (self.answered >= wanted or self.failures):
                self._changed.clear()
                await self._changed.wait()

    def failed(self, why: str) -> None:
        """Count a turn that was not answered."""
        self.failures.append(why)
        self._changed.set()

    def note(self, client: str, said: Said) -> None:
        """Count a turn that was answered."""
        self._changed.set()
        self.answered[client] += 1
        self.pulled += said.pulled_tokens > 0
        if said.miss_reason:
            self.reasons[said.miss_reason] += 1


@asynccontextmanager
async def load(stack: Stack, model: str, name: str, conversations: int = 2) -> AsyncIterator[Tally]:
    """Keep conversations going while the block runs.

    Nothing is repeated, by the clients neither: each turn that fails is a failure that
    a user has seen, and so is an answer that is cut short.

    Args:
        stack: where to send turns.
        model: served model name.
        name: begins the names of the conversations, which decide what is said.
        conversations: how many there are at a time for each kind of client.
    """
    tally = Tally()
    ending = asyncio.Event()

    async def speak(client: str, who: int, turn: Turn) -> None:
        number = 0
        while not ending.is_set():
            number += 1
            conversation = Conversation(f"{name}-{client}-{who}-{number}")
            for _ in range(_TURNS_OF_A_CONVERSATION):
                if ending.is_set():
                    return
                try:
                    tally.note(client, await turn(conversation))
                except Exception as error:  # whatever it is, a user would have seen it
                    tally.failed(f"{client}: {error!r}")
                    break

    async with talker(stack, model) as speaker, asyncio.TaskGroup() as speakers:
        turns: tuple[Turn, ...] = (
            speaker.over_grpc,
            speaker.over_http,
            speaker.streamed_over_http,
        )
        for client, turn in zip(CLIENTS, turns, strict=True):
            for who in range(conversations):
                speakers.create_task(speak(client, who, turn), name=f"{client} {who}")
        try:
            yield tally
        finally:
            ending.set()
    _log.info(
        "%s: answered %s, %d of them pulled; misses %s; %d failed",
        name,
        dict(tally.answered),
        tally.pulled,
        dict(tally.reasons),
        len(tally.failures),
    )
