"""The parts of the proof: which engines each needs, and what is run on them."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.gpu.added import added
from bench.gpu.checks import Check, check_proof, check_release
from kvloop.bench.cells import cells
from kvloop.bench.files import cell_record
from kvloop.bench.outputs import OutputCheck, check_outputs
from kvloop.bench.rounds import Progress, RoundPlan, Variant, run_rounds
from kvloop.bench.samples import Run, Shape
from kvloop.bench.slowdown import slowdown
from kvloop.bench.traffic import TrafficPlan, traffic
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
        split: takes turns of which prefill has computed the beginning before.
        decode_alone: takes turns on the decode engine alone.
    """

    turns: TurnRunner
    prefill_url: str
    decode_url: str
    bare: TurnRunner | None = None
    split: TurnRunner | None = None
    decode_alone: TurnRunner | None = None

    def variant(self, name: str, *, reuse: bool, turns: TurnRunner | None = None) -> Variant:
        """One way of holding conversations on it."""
        prefill = HttpPrefillEngine(self.prefill_url)
        return Variant(name, turns or self.turns, reuse, prefill)


@dataclass
class Outcome:
    """What a part found."""

    runs: dict[str, Run] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    outputs: dict[str, list[OutputCheck]] = field(default_factory=dict)
    traffic: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def records(self) -> dict[str, Any]:
        """Its cells, for a file."""
        return {
            name: [cell_record(cell, found) for cell in found]
            for name, found in ((name, cells(run)) for name, run in self.runs.items())
        }


@dataclass(frozen=True)
class Bench:
    """What every part needs.

    Attributes:
        ways: running engines by name; those that did not come up are missing.
        clock: monotonic seconds.
        stop: True once the time is up.
        on_progress: called after each round.
        source: of tokens and order.
        scale: all contexts are divided by it; 1 for the real thing.
    """

    ways: Mapping[str, Ways]
    clock: Callable[[], float]
    stop: Callable[[], bool]
    on_progress: Callable[[Progress], None]
    source: random.Random
    scale: int = 1

    def shape(self, context_tokens: int, answer_tokens: int = 16, **more: int) -> Shape:
        """The size of a conversation, scaled."""
        return Shape(context_tokens // self.scale, answer_tokens, **more)

    async def rounds(self, name: str, variants: list[Variant], plan: RoundPlan) -> Run:
        """Run rounds under a name of their own."""
        return await run_rounds(
            variants,
            plan,
            name=f"{name}-{self.source.randrange(1 << 32):08x}",
            source=self.source,
            clock=self.clock,
            stop=self.stop,
            on_progress=self.on_progress,
        )


@dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        engines: names of the engine pairs that it needs.
        run: runs it; what it has found so far is in the outcome if it fails.
    """

    engines: tuple[str, ...]
    run: Callable[[Bench, Outcome], Awaitable[None]]


def on_off(ways: Ways, *, control: bool = False) -> list[Variant]:
    """With reuse, which leads the history, without, and without once more."""
    variants = [ways.variant("on", reuse=True), ways.variant("off", reuse=False)]
    return [*variants, ways.variant("control", reuse=False)] if control else variants


async def exact(bench: Bench, found: Outcome) -> None:
    """Real random weights in float32: answers equal token by token; proof; release."""
    ways = bench.ways["tiny-float32"]
    plan = _quick([bench.shape(1500, 64, turns=3)], 5)
    run = await bench.rounds("float32", on_off(ways, control=True), plan)
    found.runs["float32"] = run
    found.outputs["float32"] = check_outputs(run)
    found.checks += await check_proof(ways.turns, bench.source, _fresh("proof", bench))
    found.checks.append(
        await check_release(
            ways.turns, ways.decode_url, bench.source, _fresh("release", bench), bench.clock
        )
    )


async def near_ties(bench: Bench, found: Outcome) -> None:
    """The same in bfloat16: differences with reuse beside those of other recomputations.

    One computes the prompt in the same batches, the other in two steps, as a pull does.
    """
    plan = RoundPlan([bench.shape(1500, 64)], repetitions=16, warm_ups=0)
    ways = bench.ways["tiny-bfloat16"]
    variants = on_off(ways, control=True)
    variants.append(ways.variant("split", reuse=False, turns=ways.split))
    run = await bench.rounds("bfloat16", variants, plan)
    found.runs["bfloat16"] = run
    found.outputs["bfloat16"] = check_outputs(run)


async def q8(bench: Bench, found: Outcome) -> None:
    """Qwen3-8B's shape, prefill cold, beside the bare protocol in the same rounds."""
    await _meet(bench, "q8")
    variants = on_off(bench.ways["q8"])
    if (bare := bench.ways.get("q8-bare")) is not None:
        variants += [bare.variant("bare-on", reuse=True), bare.variant("bare-off", reuse=False)]
    for context, repetitions in ((8192, 15), (16384, 9), (32768, 9)):
        plan = _quick([bench.shape(context)], repetitions)
        run = found.runs[f"q8-{context}"] = await bench.rounds("q8", variants, plan)
        found.notes += added(run)


async def guard(bench: Bench, found: Outcome) -> None:
    """Eight-billion shape over TCP: pulls are slower than computing, and held back."""
    variants = on_off(bench.ways["q8-tcp"])
    plan = RoundPlan(
        [bench.shape(8192)], repetitions=12, warm_ups=0, cold=False, settle_seconds=0.15
    )
    found.runs["guard"] = await bench.rounds("guard", variants, plan)


async def crowd(bench: Bench, found: Outcome) -> None:
    """Eight conversations at once, alone and beside other requests."""
    await _meet(bench, "q8")
    await _eight(bench, found, "q8", bench.shape(4096, 64, **_EIGHT))


async def blocks(bench: Bench, found: Outcome) -> None:
    """Blocks of 128 tokens, and the engine's own default, for comparison."""
    for name, contexts in (("q8-block-128", (8192, 32768)), ("q8-engine-default", (8192,))):
        if name not in bench.ways:
            continue
        for context in contexts:
            plan = _quick([bench.shape(context)], 5)
            variants = on_off(bench.ways[name])
            found.runs[f"{name}-{context}"] = await bench.rounds(name, variants, plan)


async def q32(bench: Bench, found: Outcome) -> None:
    """Qwen3-32B's shape in fp8: prefill cold, then warm after a long answer."""
    await _meet(bench, "q32")
    variants = on_off(bench.ways["q32"])
    for context in (16384, 32768):
        plan = RoundPlan([bench.shape(context)], repetitions=5)
        found.runs[f"q32-{context}"] = await bench.rounds("q32", variants, plan)
    shape = bench.shape(16384, 1024 // bench.scale, conversations=2)
    plan = RoundPlan([shape], repetitions=3, warm_ups=0, cold=False, serial_last=True)
    found.runs["q32-warm"] = await bench.rounds("q32-warm", variants, plan)


async def moe(bench: Bench, found: Outcome) -> None:
    """DeepSeek-V2-Lite's shape in bf16: experts and latent attention, prefill cold."""
    await _cold_contexts(bench, found, "v2lite")


async def moe_gqa(bench: Bench, found: Outcome) -> None:
    """Qwen3-30B-A3B's shape in fp8: experts, prefill cold."""
    await _cold_contexts(bench, found, "a3b")


async def two_gpus(bench: Bench, found: Outcome) -> None:
    """Qwen3-32B's shape in bf16, prefill and decode each on a GPU of its own.

    The bare protocol runs on the same engines: a second pair does not fit. So the
    connector's proof, well below 1 ms, is in its time too.
    """
    await _meet(bench, "q32-two-gpus")
    ways = bench.ways["q32-two-gpus"]
    variants = [*on_off(ways), ways.variant("bare-on", reuse=True, turns=ways.bare)]
    for context in (24576, 40960):
        plan = RoundPlan([bench.shape(context)], repetitions=5)
        run = found.runs[f"two-gpus-{context}"] = await bench.rounds("two-gpus", variants, plan)
        found.notes += added(run)
    shape = bench.shape(24576, 1024 // bench.scale, conversations=2)
    plan = RoundPlan([shape], repetitions=3, warm_ups=0, cold=False, serial_last=True)
    found.runs["two-gpus-warm"] = await bench.rounds("two-gpus-warm", on_off(ways), plan)


async def two_gpus_crowd(bench: Bench, found: Outcome) -> None:
    """The same, prefill cold: eight conversations at once, and decode while it serves pulls."""
    await _meet(bench, "q32-two-gpus-cold")
    await _eight(bench, found, "q32-two-gpus-cold", bench.shape(4096, 64, **_EIGHT))
    ways = bench.ways["q32-two-gpus-cold"]
    steady = TrafficPlan(requests=8, prompt_tokens=200, answer_tokens=384)
    async with traffic(
        ways.decode_alone or ways.turns,
        steady,
        name=_fresh("steady", bench),
        source=bench.source,
        clock=bench.clock,
    ) as seen:
        run = await bench.rounds("serving", on_off(ways), _quick([bench.shape(24576)], 8))
    found.runs["serving"] = run
    found.traffic["serving"] = slowdown(seen, run, prefill_legs_only=True).record()


PARTS = {
    "exact": Part(("tiny-float32",), exact),
    "near-ties": Part(("tiny-bfloat16",), near_ties),
    "q8": Part(("q8", "q8-bare"), q8),
    "guard": Part(("q8-tcp",), guard),
    "crowd": Part(("q8",), crowd),
    "blocks": Part(("q8-block-128", "q8-engine-default"), blocks),
    "q32": Part(("q32",), q32),
    "moe": Part(("v2lite",), moe),
    "moe-gqa": Part(("a3b",), moe_gqa),
    "two-gpus": Part(("q32-two-gpus",), two_gpus),
    "two-gpus-crowd": Part(("q32-two-gpus-cold",), two_gpus_crowd),
}
_EIGHT = {"turns": 3, "conversations": 8, "last_answer_tokens": 64}


async def _cold_contexts(bench: Bench, found: Outcome, name: str) -> None:
    """Off, on, and off once more at 8k and 32k."""
    await _meet(bench, name)
    variants = on_off(bench.ways[name], control=True)
    for context in (8192, 32768):
        run = await bench.rounds(name, variants, _quick([bench.shape(context)], 5))
        found.runs[f"{name}-{context}"] = run
        found.outputs[f"{name}-{context}"] = check_outputs(run)


async def _eight(bench: Bench, found: Outcome, name: str, shape: Shape) -> None:
    """Eight conversations at once, off and on: alone, then beside other requests."""
    ways = bench.ways[name]
    plan = _quick([shape], 3)
    found.runs["eight"] = await bench.rounds("eight", on_off(ways), plan)
    others = TrafficPlan(requests=4, prompt_tokens=1000, answer_tokens=128)
    async with traffic(
        ways.turns,
        others,
        name=_fresh("traffic", bench),
        source=bench.source,
        clock=bench.clock,
    ) as seen:
        run = await bench.rounds("eight-traffic", on_off(ways), plan)
    found.runs["eight-traffic"] = run
    found.traffic["eight-traffic"] = slowdown(seen, run).record()


async def _meet(bench: Bench, name: str) -> None:
    """Let a prefill engine measure its link: the first pulls are small on purpose, and
    the very first pays for the handshake."""
    ways = bench.ways[name]
    plan = RoundPlan(
        [bench.shape(2048)], repetitions=4, warm_ups=0, cold=False, settle_seconds=0.15
    )
    await bench.rounds(name, [ways.variant("on", reuse=True)], plan)


def _quick(shapes: list[Shape], repetitions: int) -> RoundPlan:
    """For a prefill engine without a prefix cache: there is nothing to reset."""
    return RoundPlan(shapes, repetitions=repetitions, cold=False, settle_seconds=0.15)


def _fresh(name: str, bench: Bench) -> str:
    return f"{name}-{bench.source.randrange(1 << 32):08x}"
