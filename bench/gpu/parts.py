"""The parts of the proof: which engines each needs, and what is run on them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from bench.gpu.beside import beside_bare, observed, on_own_engines, through_kvloop
from bench.gpu.checks import RenewalCheck, check_proof, check_release
from bench.gpu.openings import sharing_openings
from bench.gpu.outcome import Outcome
from bench.gpu.ways import Bench, Ways
from kvloop.bench.outputs import check_outputs
from kvloop.bench.rounds import RoundPlan, Variant
from kvloop.bench.samples import Shape
from kvloop.bench.slowdown import slowdown
from kvloop.bench.traffic import TrafficPlan, traffic


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
    """Real random weights in float32: answers equal token by token; proof; renewal; release."""
    ways = bench.ways["tiny-float32"]
    renewal = RenewalCheck(
        ways.turns,
        ways.kvmeta,
        ways.lease_seconds,
        bench.source,
        _fresh("renewal", bench),
        bench.clock,
    )
    await renewal.begin()
    plan = _quick([bench.shape(1500, 64, turns=3)], 5)
    run = await bench.rounds("float32", on_off(ways, control=True), plan)
    found.keep("float32", run)
    found.outputs["float32"] = check_outputs(run)
    found.checks += await check_proof(ways.turns, bench.source, _fresh("proof", bench))
    found.checks.append(await renewal.finish())
    found.checks.append(
        await check_release(
            ways.turns, ways.decode_url, bench.source, _fresh("release", bench), bench.clock
        )
    )


async def near_ties(bench: Bench, found: Outcome) -> None:
    """The same in bfloat16: differences with reuse beside those of other recomputations.

    One computes the prompt in the same batches, the other in two steps, as a pull does.
    """
    plan = RoundPlan([bench.shape(1500, 64)], repetitions=32, warm_ups=0, settle_seconds=0.05)
    ways = bench.ways["tiny-bfloat16"]
    variants = on_off(ways, control=True)
    variants.append(ways.variant("split", reuse=False, turns=ways.split))
    run = await bench.rounds("bfloat16", variants, plan)
    found.keep("bfloat16", run)
    found.outputs["bfloat16"] = check_outputs(run)


async def q8(bench: Bench, found: Outcome) -> None:
    """Qwen3-8B's shape, prefill cold, beside the bare protocol in the same rounds.

    The bare protocol has engines with kvloop's flags and none of its code, and goes to
    kvloop's own engines too. Every fourth of kvloop's turns is traced.
    """
    await _meet(bench, "q8")
    repetitions = {8192: 16, 16384: 8, 32768: 8}
    await beside_bare(bench, found, "q8", "q8-bare", repetitions, bare_off={8192})


async def short(bench: Bench, found: Outcome) -> None:
    """The same in less time: without 16k."""
    await _meet(bench, "q8")
    await beside_bare(bench, found, "q8", "q8-bare", {8192: 12, 32768: 6}, bare_off=())


async def q8_stock(bench: Bench, found: Outcome) -> None:
    """The same beside the bare protocol on engines with blocks of 16 tokens, as vLLM has them."""
    await _meet(bench, "q8")
    repetitions = {8192: 6, 32768: 6}
    await beside_bare(
        bench, found, "q8-stock", "q8-stock", repetitions, own=False, bare_off=repetitions
    )


async def guard(bench: Bench, found: Outcome) -> None:
    """Eight-billion shape over TCP: pulls are slower than computing, and held back."""
    variants = on_off(bench.ways["q8-tcp"])
    plan = RoundPlan(
        [bench.shape(8192)], repetitions=12, warm_ups=0, cold=False, settle_seconds=0.15
    )
    found.keep("guard", await bench.rounds("guard", variants, plan))


async def crowd(bench: Bench, found: Outcome) -> None:
    """Eight conversations at once, alone and beside other requests."""
    await _meet(bench, "q8")
    await _eight(bench, found, "q8", bench.shape(4096, 64, **_EIGHT))


async def blocks(bench: Bench, found: Outcome) -> None:
    """Blocks of 128 tokens, and the engine's own default, for comparison."""
    for name, contexts in (("q8-block-128", (8192, 32768)), ("q8-engine-default", (8192,))):
        if name not in bench.ways:
            continue
        await _meet(bench, name)
        for context in contexts:
            plan = _quick([bench.shape(context)], 5)
            variants = on_off(bench.ways[name])
            found.keep(f"{name}-{context}", await bench.rounds(name, variants, plan))


async def q32(bench: Bench, found: Outcome) -> None:
    """Qwen3-32B's shape in fp8: prefill cold, then warm after a long answer."""
    await _meet(bench, "q32")
    variants = on_off(bench.ways["q32"])
    for context in (16384, 32768):
        plan = RoundPlan([bench.shape(context)], repetitions=5)
        found.keep(f"q32-{context}", await bench.rounds("q32", variants, plan))
    shape = bench.shape(16384, 1024 // bench.scale, conversations=2)
    plan = RoundPlan([shape], repetitions=3, warm_ups=0, cold=False, serial_last=True)
    found.keep("q32-warm", await bench.rounds("q32-warm", variants, plan))


async def moe(bench: Bench, found: Outcome) -> None:
    """DeepSeek-V2-Lite's shape in bf16: experts and latent attention, prefill cold."""
    await _cold_contexts(bench, found, "v2lite")


async def moe_gqa(bench: Bench, found: Outcome) -> None:
    """Qwen3-30B-A3B's shape in fp8: experts, prefill cold."""
    await _cold_contexts(bench, found, "a3b")


async def two_gpus(bench: Bench, found: Outcome) -> None:
    """Qwen3-32B's shape in bf16, prefill and decode each on a GPU of its own.

    The bare protocol runs on the same engines, since a second pair does not fit: what it
    is compared with is kvloop's services alone. All ways share the first turn, and prefill
    is emptied before the second. Turns are traced in a run of their own.
    """
    await _meet(bench, "q32-two-gpus")
    ways = bench.ways["q32-two-gpus"]
    own = on_own_engines(bench, found, ways)
    variants = sharing_openings([*through_kvloop(bench, found, ways), *own])
    traced = sharing_openings([observed(bench, found, ways, "on", ways.turns, trace_every=1), *own])
    for name, ways_taken, context, repetitions, warm_ups in (
        ("two-gpus-24576", variants, 24576, 6, 1),
        ("two-gpus-40960", variants, 40960, 5, 1),
        ("two-gpus-hops", traced, 24576, 4, 0),
    ):
        plan = RoundPlan(
            [bench.shape(context, last_answer_tokens=8)],
            repetitions=repetitions,
            warm_ups=warm_ups,
            cold=False,
            settle_seconds=0.2,
        )
        found.keep(name, await bench.rounds(name, ways_taken, plan))


async def two_gpus_warm(bench: Bench, found: Outcome) -> None:
    """The same after a long answer, prefill warm."""
    ways = bench.ways["q32-two-gpus"]
    await _meet(bench, "q32-two-gpus")
    shape = bench.shape(24576, 1024 // bench.scale, conversations=2)
    plan = RoundPlan([shape], repetitions=3, warm_ups=0, cold=False, serial_last=True)
    found.keep("two-gpus-warm", await bench.rounds("two-gpus-warm", on_off(ways), plan))


async def two_gpus_crowd(bench: Bench, found: Outcome) -> None:
    """The same, prefill cold: eight conversations at once, and decode while it serves pulls."""
    await _meet(bench, "q32-two-gpus-cold")
    shape = bench.shape(4096, 64, **{**_EIGHT, "turns": 2})
    await _eight(bench, found, "q32-two-gpus-cold", shape, repetitions=2, others_warm_up=0)
    ways = bench.ways["q32-two-gpus-cold"]
    steady = TrafficPlan(requests=8, prompt_tokens=200, answer_tokens=384)
    async with traffic(
        ways.decode_alone or ways.turns,
        steady,
        name=_fresh("steady", bench),
        source=bench.source,
        clock=bench.clock,
    ) as seen:
        plan = _quick([bench.shape(24576, last_answer_tokens=8)], 6, warm_ups=0)
        run = await bench.rounds("serving", on_off(ways), plan)
    found.keep("serving", run)
    found.traffic["serving"] = slowdown(seen, run, prefill_legs_only=True).record()


PARTS = {
    "exact": Part(("tiny-float32",), exact),
    "near-ties": Part(("tiny-bfloat16",), near_ties),
    "q8": Part(("q8", "q8-bare"), q8),
    "short": Part(("q8", "q8-bare"), short),
    "q8-stock": Part(("q8", "q8-stock"), q8_stock),
    "guard": Part(("q8-tcp",), guard),
    "crowd": Part(("q8",), crowd),
    "blocks": Part(("q8-block-128", "q8-engine-default"), blocks),
    "q32": Part(("q32",), q32),
    "moe": Part(("v2lite",), moe),
    "moe-gqa": Part(("a3b",), moe_gqa),
    "two-gpus": Part(("q32-two-gpus",), two_gpus),
    "two-gpus-warm": Part(("q32-two-gpus",), two_gpus_warm),
    "two-gpus-crowd": Part(("q32-two-gpus-cold",), two_gpus_crowd),
}
_EIGHT = {"turns": 3, "conversations": 8, "last_answer_tokens": 64}


async def _cold_contexts(bench: Bench, found: Outcome, name: str) -> None:
    """Off, on, and off once more at 8k and 32k."""
    await _meet(bench, name)
    variants = on_off(bench.ways[name], control=True)
    for context in (8192, 32768):
        run = await bench.rounds(name, variants, _quick([bench.shape(context)], 5))
        found.keep(f"{name}-{context}", run)
        found.outputs[f"{name}-{context}"] = check_outputs(run)


async def _eight(
    bench: Bench,
    found: Outcome,
    name: str,
    shape: Shape,
    *,
    repetitions: int = 3,
    others_warm_up: int = 1,
) -> None:
    """Eight conversations at once, off and on: alone, then beside other requests.

    Args:
        bench: with the engines.
        found: gets the runs.
        name: of the engines.
        shape: of the conversations.
        repetitions: of either; each has eight turns to take a median of.
        others_warm_up: warm-ups beside other requests.
    """
    ways = bench.ways[name]
    plan = _quick([shape], repetitions)
    found.keep("eight", await bench.rounds("eight", on_off(ways), plan))
    others = TrafficPlan(requests=4, prompt_tokens=1000, answer_tokens=128)
    async with traffic(
        ways.turns,
        others,
        name=_fresh("traffic", bench),
        source=bench.source,
        clock=bench.clock,
    ) as seen:
        beside = replace(plan, warm_ups=others_warm_up)
        run = await bench.rounds("eight-traffic", on_off(ways), beside)
    found.keep("eight-traffic", run)
    found.traffic["eight-traffic"] = slowdown(seen, run).record()


async def _meet(bench: Bench, name: str) -> None:
    """Let a prefill engine measure its link: the first pulls are small on purpose, and
    the very first pays for the handshake."""
    ways = bench.ways[name]
    plan = RoundPlan(
        [bench.shape(2048)], repetitions=4, warm_ups=0, cold=False, settle_seconds=0.15
    )
    await bench.rounds(name, [ways.variant("on", reuse=True)], plan)


def _quick(shapes: list[Shape], repetitions: int, *, warm_ups: int = 1) -> RoundPlan:
    """For a prefill engine without a prefix cache: there is nothing to reset."""
    return RoundPlan(
        shapes, repetitions=repetitions, warm_ups=warm_ups, cold=False, settle_seconds=0.15
    )


def _fresh(name: str, bench: Bench) -> str:
    return f"{name}-{bench.source.randrange(1 << 32):08x}"
