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
_TURNS_OF_A_CONVERSATION = 6
"""After that it starts anew, so that prompts stay short."""
_MOST_SECONDS_TO_WAIT = 60.0


@dataclass
class Tally:
    """What has happened so far."""

    answered: int = 0
    pulled: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def more(self, turns: int) -> None:
        """Wait until so many more turns are answered, or one has failed."""
        wanted = self.answered + turns
        async with asyncio.timeout(_MOST_SECONDS_TO_WAIT):
            while self.answered < wanted and not self.failures:
                self._changed.clear()
                await self._changed.wait()

    def failed(self, why: str) -> None:
        """Count a turn that was not answered."""
        self.failures.append(why)
        self._changed.set()

    def note(self, said: Said) -> None:
        """Count a turn that was answered."""
        self._changed.set()
        self.answered += 1
        self.pulled += said.pulled_tokens > 0
        if said.miss_reason:
            self.reasons[said.miss_reason] += 1


@asynccontextmanager
async def load(stack: Stack, model: str, name: str, conversations: int = 2) -> AsyncIterator[Tally]:
    """Keep conversations going while the block runs.

    Nothing is repeated: each turn that fails is a failure that a user has seen.

    Args:
        stack: where to send turns.
        model: served model name.
        name: begins the names of the conversations, which decide what is said.
        conversations: how many there are at a time for each kind of client.
    """
    tally = Tally()
    ending = asyncio.Event()

    async def speak(kind: str, turn: Callable[[Conversation], Awaitable[Said]]) -> None:
        number = 0
        while not ending.is_set():
            number += 1
            conversation = Conversation(f"{name}-{kind}-{number}")
            for _ in range(_TURNS_OF_A_CONVERSATION):
                if ending.is_set():
                    return
                try:
                    tally.note(await turn(conversation))
                except Exception as error:  # whatever it is, a user would have seen it
                    tally.failed(f"{kind}: {error!r}")
                    break

    async with talker(stack, model) as speaker, asyncio.TaskGroup() as speakers:
        for number in range(conversations):
            speakers.create_task(speak(f"grpc-{number}", speaker.over_grpc))
            speakers.create_task(speak(f"http-{number}", speaker.over_http))
            speakers.create_task(speak(f"sse-{number}", speaker.streamed_over_http))
        try:
            yield tally
        finally:
            ending.set()
    _log.info(
        "%s: %d turns answered, %d of them pulled; misses %s; %d failed",
        name,
        tally.answered,
        tally.pulled,
        dict(tally.reasons),
        len(tally.failures),
    )
