"""Holds the conversations of a workload as they come, once for each way.

Each way has the engines to itself for one holding of the whole workload, with the same
arrivals; the ways take turns in an order drawn anew for each repetition. Every
conversation goes on from its own answers, as a client's does. Answers of two ways are
compared as long as their prompts are equal.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from array import array
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from kvloop.bench.arrivals import Arrivals
from kvloop.bench.decode_fleet import DecodeFleet, retained_if_known
from kvloop.bench.rounds import Variant
from kvloop.bench.samples import RoundSample, Run, Sample, Workload
from kvloop.bench.scripts import Script, TokenStreams, longest
from kvloop.bench.transfers import Transfers
from kvloop.bench.turns import TurnRequest, TurnResult

_WARM_UP = Arrivals(at_once=1)
_LOOK_SECONDS = 0.5
"""How often the ledger is asked what is retained, at most."""


@dataclass(frozen=True, slots=True)
class SchedulePlan:
    """What is run.

    Attributes:
        name: what the conversations are, in words.
        scripts: the conversations.
        arrivals: how they come.
        repetitions: measured repetitions, each with arrivals of its own.
        warm_ups: conversations held before, one after the other, that leave no samples.
        cold: empty prefill's prefix cache before each holding.
        settle_seconds: pause before each holding, in which engines free what the one
            before has left.
    """

    name: str
    scripts: Sequence[Script]
    arrivals: Arrivals
    repetitions: int = 1
    warm_ups: int = 2
    cold: bool = False
    settle_seconds: float = 1.0

    def __post_init__(self) -> None:
        if not self.scripts:
            raise ValueError("there is no conversation to hold")
        if self.repetitions < 1 or self.warm_ups < 0:
            raise ValueError("there is at least one repetition, and no negative warm-up")

    @property
    def workload(self) -> Workload:
        """What the samples are part of."""
        return Workload(
            self.name, str(self.arrivals), len(self.scripts), max(longest(self.scripts), 1)
        )


@dataclass(frozen=True, slots=True)
class Advance:
    """How far a run has got.

    Attributes:
        done: turns done.
        total: turns in all.
        variant: way of the last one.
        turn: its number.
        prompt_tokens: tokens of its prompt.
        ttft_seconds: what it took; None if it failed.
    """

    done: int
    total: int
    variant: str
    turn: int
    prompt_tokens: int
    ttft_seconds: float | None


@dataclass(slots=True)
class _Holding:
    """All conversations of the workload, held one way."""

    name: str
    variant: Variant
    number: int
    arrivals: Arrivals
    samples: list[Sample]
    retained_blocks: int | None = None
    looked_at: float = float("-inf")


class _Schedule:
    def __init__(
        self,
        variants: Sequence[Variant],
        plan: SchedulePlan,
        streams: TokenStreams,
        *,
        name: str,
        source: random.Random,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
        on_progress: Callable[[Advance], None],
        fleet: DecodeFleet | None,
    ) -> None:
        self._variants = variants
        self._plan = plan
        self._load = plan.workload
        self._streams = streams
        self._name = name
        self._source = source
        self._clock = clock
        self._sleep = sleep
        self._on_progress = on_progress
        self._fleet = fleet
        self._done = 0
        turns = sum(len(script.turns) for script in plan.scripts) * plan.repetitions
        warm = sum(len(script.turns) for script in plan.scripts[: plan.warm_ups])
        self._total = (turns + warm) * len(variants)
        self.samples: list[Sample] = []
        self.rounds: list[RoundSample] = []

    async def run(self, stop: Callable[[], bool]) -> None:
        if self._plan.warm_ups:
            scripts = self._plan.scripts[: self._plan.warm_ups]
            for variant in self._variants:
                name = f"{self._name}-warm-up-{variant.name}"
                await self._hold(_Holding(name, variant, -1, _WARM_UP, []), scripts, None)
        for number in range(self._plan.repetitions):
            starts = self._plan.arrivals.starts(self._plan.scripts, self._source)
            order = list(self._variants)
            self._source.shuffle(order)
            for variant in order:
                if stop():
                    return
                await self._measure(variant, number, starts)

    async def _measure(self, variant: Variant, number: int, starts: list[float] | None) -> None:
        holding = _Holding(
            f"{self._name}-{number}-{variant.name}", variant, number, self._plan.arrivals, []
        )
        await self._sleep(self._plan.settle_seconds)
        before = await self._prepare(variant)
        started = self._clock()
        await self._hold(holding, self._plan.scripts, starts)
        seconds = self._clock() - started
        transfers = None
        if variant.prefill is not None and before is not None:
            # The engine adds a pull to its sums in a later step of its scheduler.
            await self._sleep(self._plan.settle_seconds)
            transfers = await variant.prefill.transfers() - before
        self.samples += sorted(holding.samples, key=lambda s: (s.conversation, s.turn))
        self.rounds.append(
            RoundSample(
                shape=self._load,
                variant=variant.name,
                repetition=number,
                turn=0,
                started_at=started,
                seconds=seconds,
                transfers=transfers,
                retained_blocks=holding.retained_blocks,
            )
        )

    async def _prepare(self, variant: Variant) -> Transfers | None:
        if variant.prefill is None:
            return None
        if self._plan.cold:
            await variant.prefill.reset_prefix_cache()
        return await variant.prefill.transfers()

    async def _hold(
        self, holding: _Holding, scripts: Sequence[Script], starts: list[float] | None
    ) -> None:
        began = self._clock()
        numbered = enumerate(scripts)
        async with asyncio.TaskGroup() as group:
            if starts is None:
                for lane in range(min(holding.arrivals.at_once or 1, len(scripts))):
                    group.create_task(self._lane(holding, numbered), name=f"lane {lane}")
                return
            for number, script in numbered:
                group.create_task(
                    self._talk(holding, number, script, began + starts[number]),
                    name=f"conversation {number}",
                )

    async def _lane(self, holding: _Holding, waiting: Iterator[tuple[int, Script]]) -> None:
        for number, script in waiting:
            await self._talk(holding, number, script, self._clock())

    async def _talk(self, holding: _Holding, number: int, script: Script, start: float) -> None:
        conversation = f"{holding.name}-{number}"
        history: list[int] = []
        due = start
        for index, turn in enumerate(script.turns):
            if (wait := due - self._clock()) > 0:
                await self._sleep(wait)
            history += self._streams.tokens(turn.message)
            request = TurnRequest(
                conversation=conversation,
                prompt=tuple(history),
                answer_tokens=turn.answer_tokens,
                reuse=holding.variant.reuse,
                last=index == len(script.turns) - 1,
                cache_salt=holding.name,
            )
            result = await self._take(holding, number, index + 1, request, due)
            ended = self._clock()
            await self._look(holding)
            if result is None:
                break  # its next turns would be first ones
            history += result.token_ids
            if not request.last:
                due = holding.arrivals.due(script, script.turns[index + 1], start, ended)
        await holding.variant.turns.end(conversation)

    async def _take(
        self, holding: _Holding, number: int, turn: int, request: TurnRequest, due: float
    ) -> TurnResult | None:
        variant = holding.variant
        sample = Sample(
            self._load,
            variant.name,
            holding.number,
            number,
            turn,
            None,
            prompt_digest=zlib.crc32(array("I", request.prompt).tobytes()),
            late_seconds=max(self._clock() - due, 0.0),
        )
        sample = await variant.take(sample, request)
        holding.samples.append(sample)
        self._done += 1
        self._on_progress(
            Advance(
                done=self._done,
                total=self._total,
                variant=variant.name,
                turn=turn,
                prompt_tokens=len(request.prompt),
                ttft_seconds=sample.result.ttft_seconds if sample.result else None,
            )
        )
        return sample.result

    async def _look(self, holding: _Holding) -> None:
        """Note what is retained, if the last look is a while ago."""
        if self._fleet is None or self._clock() - holding.looked_at < _LOOK_SECONDS:
            return
        holding.looked_at = self._clock()
        found = await retained_if_known(self._fleet)
        if found is not None:
            holding.retained_blocks = max(holding.retained_blocks or 0, found)


async def run_schedule(
    variants: Sequence[Variant],
    plan: SchedulePlan,
    streams: TokenStreams,
    *,
    name: str,
    source: random.Random,
    clock: Callable[[], float],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    on_progress: Callable[[Advance], None] = lambda advance: None,
    stop: Callable[[], bool] = lambda: False,
    fleet: DecodeFleet | None = None,
) -> Run:
    """Hold a workload in every way.

    Args:
        variants: the ways.
        plan: what is run.
        streams: of the messages' tokens.
        name: prefix of the conversations' names; must not have been used before.
        source: of arrivals and order.
        clock: monotonic seconds.
        sleep: waits for a number of seconds.
        on_progress: called after each turn.
        stop: asked before each holding; True ends the run early.
        fleet: decode workers, to say what they retain; None if they cannot be asked.

    Raises:
        UnavailableError: a prefill engine cannot be asked.
        ValueError: the arrivals need times that the scripts do not have.
    """
    schedule = _Schedule(
        variants,
        plan,
        streams,
        name=name,
        source=source,
        clock=clock,
        sleep=sleep,
        on_progress=on_progress,
        fleet=fleet,
    )
    await schedule.run(stop)
    return Run(tuple(schedule.samples), tuple(schedule.rounds))
