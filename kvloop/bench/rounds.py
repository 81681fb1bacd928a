"""Holds the same conversations several ways, turn by turn, in random order.

A round is one turn of all conversations of a repetition, one way. The ways take
their rounds of a turn one after another, in an order drawn anew each time, so
that whatever drifts on the machine drifts for all of them alike. All ways carry
the same history: the first one's answers. Their prompts are therefore equal token
by token, and so can their answers be compared.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from kvloop.bench.decode_fleet import DecodeFleet, retained_if_known
from kvloop.bench.samples import RoundSample, Run, Sample, Shape
from kvloop.bench.transfers import PrefillEngine, Transfers
from kvloop.bench.turns import TurnRequest, TurnResult, TurnRunner
from kvloop.errors import KvloopError


@dataclass(frozen=True, slots=True)
class Variant:
    """One way of holding a conversation.

    Attributes:
        name: "off", "on", "control", ...
        turns: takes its turns.
        reuse: let prefill pull what decode retains.
        prefill: its prefill engine, to make it cold and to count pulls; None if
            it cannot be asked.
    """

    name: str
    turns: TurnRunner
    reuse: bool
    prefill: PrefillEngine | None = None

    async def take(self, sample: Sample, request: TurnRequest) -> Sample:
        """The sample of one turn, with what came of it: a result or an error."""
        try:
            return replace(sample, result=await self.turns.run(request))
        except KvloopError as error:
            return replace(sample, error=f"{error.reason}: {error.message}")


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """What is run.

    Attributes:
        shapes: sizes of conversations, one after another.
        repetitions: measured repetitions of each shape.
        warm_ups: repetitions before them that leave no samples.
        cold: empty prefill's prefix cache before each round.
        settle_seconds: pause before each round, in which engines free what the
            round before has left.
        think_seconds: pause between two turns.
        vocabulary: tokens are drawn from 10 up to this.
        serial_last: take the last turns of a repetition's conversations one after
            another. With long answers, generating them for several conversations
            at once saves most of the time, and the last turn is still measured
            by itself.
    """

    shapes: Sequence[Shape]
    repetitions: int = 5
    warm_ups: int = 1
    cold: bool = True
    settle_seconds: float = 0.3
    think_seconds: float = 0.0
    vocabulary: int = 4000
    serial_last: bool = False

    def __post_init__(self) -> None:
        if self.repetitions < 1 or self.warm_ups < 0:
            raise ValueError("there is at least one repetition, and no negative warm-up")
        if self.vocabulary <= 10:
            raise ValueError("the vocabulary has more than 10 tokens")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has got.

    Attributes:
        done: rounds done.
        total: rounds in all.
        shape: size of the conversations at hand.
        repetition: -1 for a warm-up.
        turn: turn of the round that was done.
        variant: its way.
        ttft_seconds: of its first conversation; None if that failed.
    """

    done: int
    total: int
    shape: Shape
    repetition: int
    turn: int
    variant: str
    ttft_seconds: float | None


@dataclass(slots=True)
class _Repetition:
    """One repetition of one shape under way."""

    name: str
    shape: Shape
    number: int
    histories: list[list[int]] = field(default_factory=list)


class _Rounds:
    def __init__(
        self,
        variants: Sequence[Variant],
        plan: RoundPlan,
        name: str,
        source: random.Random,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
        on_progress: Callable[[Progress], None],
        fleet: DecodeFleet | None,
    ) -> None:
        self._fleet = fleet
        self._variants = variants
        self._plan = plan
        self._name = name
        self._source = source
        self._clock = clock
        self._sleep = sleep
        self._on_progress = on_progress
        self._done = 0
        self._total = sum(shape.turns for shape in plan.shapes) * (
            (plan.repetitions + plan.warm_ups) * len(variants)
        )
        self.samples: list[Sample] = []
        self.rounds: list[RoundSample] = []

    async def run(self, stop: Callable[[], bool]) -> None:
        for index, shape in enumerate(self._plan.shapes):
            for number in range(-self._plan.warm_ups, self._plan.repetitions):
                if stop():
                    return
                await self._repeat(f"{self._name}-{index}-{number}", shape, number)

    async def _repeat(self, name: str, shape: Shape, number: int) -> None:
        repetition = _Repetition(name, shape, number)
        repetition.histories = [
            self._tokens(shape.context_tokens) for _ in range(shape.conversations)
        ]
        try:
            for turn in range(1, shape.turns + 1):
                if turn > 1 and self._plan.think_seconds:
                    await self._sleep(self._plan.think_seconds)
                await self._take_turn(repetition, turn)
        finally:
            await self._end(repetition)

    async def _take_turn(self, repetition: _Repetition, turn: int) -> None:
        shape = repetition.shape
        order = list(self._variants)
        self._source.shuffle(order)
        answers: dict[str, list[TurnResult | None]] = {}
        for variant in order:
            answers[variant.name] = await self._round(variant, repetition, turn)
        for conversation, history in enumerate(repetition.histories):
            leader = answers[self._variants[0].name][conversation]
            said = leader.token_ids if leader else self._tokens(shape.answer_of(turn))
            history += [*said, *self._tokens(shape.message_tokens)]

    async def _round(
        self, variant: Variant, repetition: _Repetition, turn: int
    ) -> list[TurnResult | None]:
        await self._sleep(self._plan.settle_seconds)
        before = await self._prepare(variant)
        started = self._clock()
        samples = await self._converse(variant, repetition, turn)
        seconds = self._clock() - started
        if repetition.number >= 0:
            self.samples += samples
            self.rounds.append(
                RoundSample(
                    shape=repetition.shape,
                    variant=variant.name,
                    repetition=repetition.number,
                    turn=turn,
                    started_at=started,
                    seconds=seconds,
                    transfers=await self._pulled_since(variant, before),
                    retained_blocks=await retained_if_known(self._fleet),
                )
            )
        self._done += 1
        first = samples[0].result
        self._on_progress(
            Progress(
                done=self._done,
                total=self._total,
                shape=repetition.shape,
                repetition=max(repetition.number, -1),
                turn=turn,
                variant=variant.name,
                ttft_seconds=first.ttft_seconds if first else None,
            )
        )
        return [sample.result for sample in samples]

    async def _converse(self, variant: Variant, repetition: _Repetition, turn: int) -> list[Sample]:
        numbers = range(repetition.shape.conversations)
        if self._plan.serial_last and turn == repetition.shape.turns:
            return [await self._one(variant, repetition, turn, number) for number in numbers]
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    self._one(variant, repetition, turn, number), name=f"conversation {number}"
                )
                for number in numbers
            ]
        return [task.result() for task in tasks]

    async def _one(
        self, variant: Variant, repetition: _Repetition, turn: int, number: int
    ) -> Sample:
        shape = repetition.shape
        sample = Sample(shape, variant.name, repetition.number, number, turn, None)
        request = TurnRequest(
            conversation=_conversation(repetition, variant, number),
            prompt=tuple(repetition.histories[number]),
            answer_tokens=shape.answer_of(turn),
            reuse=variant.reuse,
            last=turn == shape.turns,
        )
        return await variant.take(sample, request)

    async def _prepare(self, variant: Variant) -> Transfers | None:
        if variant.prefill is None:
            return None
        if self._plan.cold:
            await variant.prefill.reset_prefix_cache()
        return await variant.prefill.transfers()

    async def _pulled_since(self, variant: Variant, before: Transfers | None) -> Transfers | None:
        if variant.prefill is None or before is None:
            return None
        # The engine adds a pull to its sums in a later step of its scheduler.
        await self._sleep(self._plan.settle_seconds)
        return await variant.prefill.transfers() - before

    async def _end(self, repetition: _Repetition) -> None:
        for variant in self._variants:
            for number in range(repetition.shape.conversations):
                await variant.turns.end(_conversation(repetition, variant, number))

    def _tokens(self, count: int) -> list[int]:
        return [self._source.randrange(10, self._plan.vocabulary) for _ in range(count)]


def _conversation(repetition: _Repetition, variant: Variant, number: int) -> str:
    return f"{repetition.name}-{number}-{variant.name}"


async def run_rounds(
    variants: Sequence[Variant],
    plan: RoundPlan,
    *,
    name: str,
    source: random.Random,
    clock: Callable[[], float],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    stop: Callable[[], bool] = lambda: False,
    fleet: DecodeFleet | None = None,
) -> Run:
    """Hold conversations of every shape in every way.

    Args:
        variants: the ways; the first one's answers make the history of all.
        plan: what is run.
        name: prefix of the conversations' names; must not have been used before.
        source: of tokens and order.
        clock: monotonic seconds.
        sleep: waits for a number of seconds.
        on_progress: called after each round.
        stop: asked before each repetition; True ends the run early.
        fleet: decode workers, to say what they retain; None if they cannot be asked.

    Raises:
        UnavailableError: a prefill engine cannot be asked.
    """
    rounds = _Rounds(variants, plan, name, source, clock, sleep, on_progress, fleet)
    await rounds.run(stop)
    return Run(tuple(rounds.samples), tuple(rounds.rounds))
