"""Conversations that go on while the processes under them are killed."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.soak.attempts import Attempts
from bench.soak.processes import Service
from bench.soak.referee import Referee
from bench.soak.speakers import Front, Manner
from bench.soak.talks import ChatTalk, Lengths, Talk, TokenTalk
from bench.soak.tally import Tally

_POLITE = 0.25
"""Share of the ends that are asked for with SIGTERM; the others are SIGKILL."""
_FIRST_RETRY_SECONDS = 0.1
_LAST_RETRY_SECONDS = 2.0


@dataclass(frozen=True)
class Attack:
    """How processes are killed.

    Attributes:
        every_seconds: one at random.
        settle_seconds: how long after a process serves again its end still excuses
            errors: the others have to find it first.
    """

    every_seconds: float
    settle_seconds: float


@dataclass
class Killer:
    """Kills services, and knows what that excuses.

    Attributes:
        attack: how.
        victims: whom.
        seen: those of them whose end clients may see: routers, and decode's sidecars.
            All others are to be done without.
        kills: by service and signal.
    """

    attack: Attack
    victims: Sequence[Service]
    seen: Sequence[Service]
    clock: Callable[[], float]
    rng: random.Random
    kills: dict[str, int] = field(default_factory=dict)
    _excused_until: float = 0.0
    _down: set[str] = field(default_factory=set)

    async def run(self, seconds: float) -> None:
        """Kill one after the other, for so long; return when the last one serves again."""
        until = self.clock() + seconds
        async with asyncio.TaskGroup() as returns:
            while self.clock() + self.attack.every_seconds < until:
                await asyncio.sleep(self.attack.every_seconds)
                standing = [each for each in self.victims if each.up.is_set()]
                if standing:
                    returns.create_task(self.kill(self.rng.choice(standing)))

    @property
    def excuse(self) -> str:
        """What excuses an error now; empty if nothing does."""
        if self._down:
            return ", ".join(sorted(self._down)) + " down"
        return "just after" if self.clock() < self._excused_until else ""

    async def kill(self, victim: Service) -> None:
        """Kill one, and wait until it serves again."""
        how = signal.SIGTERM if self.rng.random() < _POLITE else signal.SIGKILL
        name = f"{victim.name} {how.name}"
        self.kills[name] = self.kills.get(name, 0) + 1
        if victim in self.seen:
            self._down.add(victim.name)
        victim.end(how)
        await victim.up.wait()
        if victim in self.seen:
            self._down.discard(victim.name)
            self._excused_until = self.clock() + self.attack.settle_seconds


@dataclass(frozen=True)
class Crowd:
    """Who talks.

    Attributes:
        conversations: at once.
        seconds: how long new turns are begun.
        pause_seconds: between an answer and the next turn, at most.
        turn_seconds: after which a single attempt counts as hanging.
        patience_seconds: after which a turn counts as failed for good.
        lengths: of conversations.
    """

    conversations: int
    seconds: float
    pause_seconds: float
    turn_seconds: float
    patience_seconds: float
    lengths: Lengths


class Conversations:
    """Runs them, as sensible clients would: what fails is sent again, to another router.

    Args:
        crowd: who talks.
        fronts: clients of all routers.
        referee: knows the right answers.
        killer: knows what excuses an error.
        tally: counts.
        clock: seconds on a clock that never goes back.
        rng: everything that is left to chance.
    """

    def __init__(
        self,
        crowd: Crowd,
        fronts: Sequence[Front],
        referee: Referee,
        killer: Killer,
        tally: Tally,
        *,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self._crowd = crowd
        self._fronts = fronts
        self._referee = referee
        self._killer = killer
        self._tally = tally
        self._clock = clock
        self._rng = rng
        self._until = 0.0
        self.attempts = Attempts(tally, crowd.turn_seconds)

    async def run(self) -> None:
        """Begin turns for as long as it lasts, and end those that are under way."""
        self._until = self._clock() + self._crowd.seconds
        async with asyncio.TaskGroup() as tasks:
            for number in range(self._crowd.conversations):
                tasks.create_task(self._place(number), name=f"conversation {number}")

    async def _place(self, number: int) -> None:
        serial = 0
        turns = self._rng.randint(1, self._crowd.lengths.turns)
        await asyncio.sleep(self._rng.random() * self._crowd.pause_seconds)
        while self._clock() < self._until:
            rng = random.Random(self._rng.random())
            name = f"c{number}-{serial}"
            talk = ChatTalk(name, rng) if number % 3 == 2 else TokenTalk(name, rng)
            await self._converse(talk, over_grpc=number % 3 == 0, turns=turns)
            turns = self._crowd.lengths.turns
            serial += 1

    async def _converse(self, talk: Talk, *, over_grpc: bool, turns: int) -> None:
        for _ in range(turns):
            if self._clock() >= self._until:
                return
            talk.ask(self._rng.randint(*self._crowd.lengths.words))
            if not await self._turn(talk, over_grpc):
                return
            await asyncio.sleep(self._rng.random() * self._crowd.pause_seconds)

    async def _turn(self, talk: Talk, over_grpc: bool) -> bool:
        answer = self._crowd.lengths.answer
        right = talk.right(self._referee, answer)
        started = self._clock()
        pause = _FIRST_RETRY_SECONDS
        choice = self._rng.randrange(len(self._fronts))
        while self._clock() - started < self._crowd.patience_seconds:
            front = self._fronts[choice % len(self._fronts)]
            choice += 1
            speaker = front.tokens_over_grpc if over_grpc else front.over_http
            heard = await self.attempts.say(speaker, talk, Manner(answer))
            if heard is None:
                return False
            trouble = heard.trouble
            # An error that speaks of a defect is excused by nothing.
            excuse = self._killer.excuse if trouble is not None and trouble.transient else ""
            if self._tally.judge(heard, right, answer, talk.name, excuse):
                talk.answered(right)
                self._tally.took(self._clock() - started)
                return True
            self._tally.repeated += 1
            await asyncio.sleep(pause * (0.5 + self._rng.random()))
            pause = min(2 * pause, _LAST_RETRY_SECONDS)
        self._tally.gives_up(talk.name)
        return False
