"""Turns of which more is kept than their times at the client: traces, and engines' own times."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench.gpu.engine_times import EngineTimes, EngineWatch
from bench.gpu.spans import SpanSink, SpanTimes, traced_call
from kvloop.bench.turns import TurnRequest, TurnResult, TurnRunner

_NANOSECONDS = 1_000_000_000
CLIENT = "client"
"""Name of the span that the client itself would have sent."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What was seen of one turn.

    Attributes:
        record_id: as in the turn's result; id of its trace.
        traced: whether its trace was asked for.
        started_ns: wall-clock time of the call.
        first_chunk_ns: and of the first chunk, at the client.
        prefill: its request on the prefill engine.
        decode: its request on the decode engine.
    """

    record_id: str
    traced: bool
    started_ns: int
    first_chunk_ns: int
    prefill: EngineTimes
    decode: EngineTimes


class Book:
    """All observations of a part.

    Args:
        sink: gets the services' spans; None if they send none.
    """

    def __init__(self, sink: SpanSink | None = None) -> None:
        self.sink = sink
        self.seen: dict[str, Observation] = {}

    def note(self, observation: Observation) -> None:
        """Keep one."""
        self.seen[observation.record_id] = observation

    @property
    def traced(self) -> set[str]:
        """Ids of the turns with a trace."""
        return {seen.record_id for seen in self.seen.values() if seen.traced}

    def spans(self, record_id: str) -> list[SpanTimes]:
        """The spans of one turn, the client's own first."""
        seen = self.seen[record_id]
        own = SpanTimes(record_id, CLIENT, CLIENT, seen.started_ns, seen.first_chunk_ns, {})
        return [own, *(self.sink.of(record_id) if self.sink is not None else ())]

    async def complete(self, *, at_most_seconds: float) -> None:
        """Wait for spans that are on their way."""
        if self.sink is not None:
            await self.sink.until_whole(self.traced, at_most_seconds=at_most_seconds)

    def records(self) -> dict[str, Any]:
        """All of it, for a file. Times of spans are wall-clock nanoseconds."""
        return {
            "turns": [asdict(seen) for seen in self.seen.values()],
            "spans": [asdict(s) for record_id in self.traced for s in self.spans(record_id)],
        }


class ObservedTurns:
    """Implements TurnRunner: takes turns and notes more about the last one of a conversation.

    Args:
        turns: takes them.
        watch: looks at their engines; None: nobody does. Shared by all that take turns there.
        book: where observations go.
        trace_every: every so many-th of these last turns is traced; 0: none.
        wall_clock: nanoseconds, as those of spans.
    """

    def __init__(
        self,
        turns: TurnRunner,
        watch: EngineWatch | None,
        book: Book,
        *,
        trace_every: int,
        wall_clock: Callable[[], int],
    ) -> None:
        self._turns = turns
        self._watch = watch
        self._book = book
        self._trace_every = trace_every if book.sink is not None else 0
        self._wall_clock = wall_clock
        self._last_turns = 0

    async def run(self, request: TurnRequest) -> TurnResult:
        """See TurnRunner."""
        record_id = uuid.uuid4().hex
        traced = request.last and self._its_turn()
        with traced_call(record_id) if traced else nullcontext():
            started = self._wall_clock()
            result = await self._turns.run(request)
        prefill, decode = EngineTimes(), EngineTimes()
        if self._watch is not None:
            prefill, decode = await self._watch.look()
        if not request.last:
            return result
        first = started + round(result.ttft_seconds * _NANOSECONDS)
        self._book.note(Observation(record_id, traced, started, first, prefill, decode))
        return replace(result, record_id=record_id)

    async def end(self, conversation: str) -> None:
        """See TurnRunner."""
        await self._turns.end(conversation)

    def _its_turn(self) -> bool:
        self._last_turns += 1
        return bool(self._trace_every) and self._last_turns % self._trace_every == 0
