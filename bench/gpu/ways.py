"""Running engines and ways of taking turns on them, as parts get them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from bench.gpu.engine_times import EngineWatch
from kvloop.bench.rounds import Progress, RoundPlan, Variant, run_rounds
from kvloop.bench.samples import Run, Shape
from kvloop.bench.transfers import HttpPrefillEngine
from kvloop.bench.turns import TurnRunner


@dataclass(frozen=True)
class Ways:
    """A running pair of engines, and how turns are taken on it.

    Attributes:
        turns: takes turns on it.
        prefill_url: of its prefill server.
        decode_url: of its decode server.
        bare: takes turns on the same engines, leg by leg, past all of kvloop but the
            connector; None where `turns` does so already.
        gateway: takes last turns over the router's HTTP front; None where `turns` has no router.
        split: takes turns of which prefill has computed the beginning before.
        decode_alone: takes turns on the decode engine alone.
        watch: sees what the engines say of single requests; None: nobody asks them.
        kvmeta: host:port of its ledger; empty for the bare protocol.
        lease_seconds: for which decode keeps blocks that nobody renews.
    """

    turns: TurnRunner
    prefill_url: str
    decode_url: str
    bare: TurnRunner | None = None
    gateway: TurnRunner | None = None
    split: TurnRunner | None = None
    decode_alone: TurnRunner | None = None
    watch: EngineWatch | None = None
    kvmeta: str = ""
    lease_seconds: float = 60.0

    def variant(self, name: str, *, reuse: bool, turns: TurnRunner | None = None) -> Variant:
        """One way of holding conversations on it."""
        prefill = HttpPrefillEngine(self.prefill_url)
        return Variant(name, turns or self.turns, reuse, prefill)


@dataclass(frozen=True)
class Bench:
    """What every part needs.

    Attributes:
        ways: running engines by name; those that did not come up are missing.
        clock: monotonic seconds.
        wall_clock: nanoseconds since 1970.
        stop: True once the time is up.
        on_progress: called after each round.
        source: of tokens and order.
        scale: all contexts are divided by it; 1 for the real thing.
        most_repetitions: of any shape; None: as many as the part wants.
    """

    ways: Mapping[str, Ways]
    clock: Callable[[], float]
    wall_clock: Callable[[], int]
    stop: Callable[[], bool]
    on_progress: Callable[[Progress], None]
    source: random.Random
    scale: int = 1
    most_repetitions: int | None = None

    def shape(self, context_tokens: int, answer_tokens: int = 16, **more: int) -> Shape:
        """The size of a conversation, scaled."""
        return Shape(context_tokens // self.scale, answer_tokens, **more)

    async def rounds(self, name: str, variants: list[Variant], plan: RoundPlan) -> Run:
        """Run rounds under a name of their own."""
        if self.most_repetitions is not None:
            plan = replace(plan, repetitions=min(plan.repetitions, self.most_repetitions))
        return await run_rounds(
            variants,
            plan,
            name=f"{name}-{self.source.randrange(1 << 32):08x}",
            source=self.source,
            clock=self.clock,
            stop=self.stop,
            on_progress=self.on_progress,
        )
