"""Many streams at once through one router, some of which meet a fault."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

from bench.soak.attempts import Attempts
from bench.soak.faults import Dice, Injection
from bench.soak.referee import Referee
from bench.soak.speakers import Front, Manner, Speaker
from bench.soak.stack import MODEL
from bench.soak.talks import ChatTalk, Lengths, Talk, TokenTalk
from bench.soak.tally import Tally
from kvloop.errors import KvloopError

_REPEATS = 3
_ENDS_SAID = 0.5
"""Share of the conversations whose end the client says."""
_KINDS = 3
"""Kinds of clients: token ids over gRPC, token ids over HTTP, chats over HTTP."""


@dataclass(frozen=True)
class Load:
    """How streams behave.

    Attributes:
        streams: at once.
        seconds: how long new turns are begun.
        ramp_seconds: over which the streams begin.
        pause_seconds: between an answer and the next turn, at most.
        turn_seconds: after which a turn counts as hanging.
        lengths: of conversations.
    """

    streams: int
    seconds: float
    ramp_seconds: float
    pause_seconds: float
    turn_seconds: float
    lengths: Lengths


class Streams:
    """Runs them.

    Args:
        load: how they behave.
        front: clients of the router.
        referee: knows the right answers.
        dice: which turns meet a fault.
        tally: counts.
        clock: seconds on a clock that never goes back.
        rng: everything else that is left to chance.
    """

    def __init__(
        self,
        load: Load,
        front: Front,
        referee: Referee,
        dice: Dice,
        tally: Tally,
        *,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self._load = load
        self._front = front
        self._referee = referee
        self._dice = dice
        self._tally = tally
        self._clock = clock
        self._rng = rng
        self._until = 0.0
        self.attempts = Attempts(tally, load.turn_seconds)

    async def run(self) -> None:
        """Begin turns for as long as the load lasts, and end those that are under way."""
        self._until = self._clock() + self._load.seconds
        async with asyncio.TaskGroup() as streams:
            for number in range(self._load.streams):
                streams.create_task(self._stream(number), name=f"stream {number}")

    async def _stream(self, number: int) -> None:
        load = self._load
        await asyncio.sleep(load.ramp_seconds * number / load.streams)
        # The first conversation is one that has been going on for a while, so that
        # not all of them end at once.
        turns = self._rng.randint(1, load.lengths.turns)
        serial = 0
        while self._clock() < self._until:
            talk, speaker = self._talk(number, serial)
            await self._converse(talk, speaker, turns)
            turns = load.lengths.turns
            serial += 1

    def _talk(self, number: int, serial: int) -> tuple[Talk, Speaker]:
        name = f"s{number}-{serial}"
        rng = random.Random(self._rng.random())
        match number % _KINDS:
            case 0:
                return TokenTalk(name, rng), self._front.tokens_over_grpc
            case 1:
                return TokenTalk(name, rng), self._front.over_http
            case _:
                return ChatTalk(name, rng), self._front.over_http

    async def _converse(self, talk: Talk, speaker: Speaker, turns: int) -> None:
        for _ in range(turns):
            if self._clock() >= self._until:
                break
            talk.ask(self._rng.randint(*self._load.lengths.words))
            if not await self._turn(talk, speaker):
                return
            await asyncio.sleep(self._rng.random() * self._load.pause_seconds)
        if isinstance(talk, TokenTalk) and self._rng.random() < _ENDS_SAID:
            try:
                await self._front.grpc.end_conversation(talk.name, model=MODEL)
            except KvloopError as error:
                self._tally.unexcused[f"end of conversation: {error.reason}"] += 1

    async def _turn(self, talk: Talk, speaker: Speaker) -> bool:
        """One turn to its end, repeated if it fails; False if that did not help."""
        answer = self._load.lengths.answer
        right = talk.right(self._referee, answer)
        injection = self._dice.draw()
        if injection is not None:
            self._tally.injected[injection.name] += 1
        started = self._clock()
        for _ in range(1 + _REPEATS):
            manner = injection.manner(answer) if injection is not None else Manner(answer)
            heard = await self.attempts.say(speaker, talk, manner)
            if heard is None:
                return False
            done = self._tally.judge(heard, right, answer, talk.name, _excuse(injection))
            if done and not heard.left:
                talk.answered(right)
                self._tally.took(self._clock() - started)
                return True
            injection = None  # a client that has left, or was failed, asks again
            self._tally.repeated += 1
        self._tally.gives_up(talk.name)
        return False


def _excuse(injection: Injection | None) -> str:
    return injection.name if injection is not None and injection.may_fail else ""
