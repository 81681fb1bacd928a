"""The parts of the proof: which engines each needs, and what is run on them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

from bench.gpu.added import GATEWAY
from bench.gpu.checks import RenewalCheck, check_proof, check_release
from bench.gpu.observed import ObservedTurns
from bench.gpu.outcome import Outcome
from bench.gpu.ways import Bench, Ways
from kvloop.bench.outputs import check_outputs
from kvloop.bench.rounds import RoundPlan, Variant
from kvloop.bench.samples import Shape
from kvloop.bench.slowdown import slowdown
from kvloop.bench.traffic import TrafficPlan, traffic
from kvloop.bench.turns import TurnRunner


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

    The bare protocol has engines like kvloop's, but for the connector. Every third of
    kvloop's turns is traced. In the end turns follow idle time of several lengths, all of
    them traced.
    """
    await _beside_bare(bench, found, "q8", "q8-bare", {8192: 15, 16384: 9, 32768: 9})
    ours = bench.ways["q8"]
    bare, straight = _bare_way(bench, "q8-bare", ours)
    # Nothing asks the engines anything between the idle time and the turn.
    variants = [
        replace(
            _observed(bench, found, ways, name, turns, reuse=True, trace_every=every),
            prefill=None,
        )
        for name, ways, turns, every in (
            ("on", ours, ours.turns, 1),
            ("bare-on", bare, straight, 0),
        )
    ]
    for idle_seconds in (0.0, 0.05, 1.0):
        plan = RoundPlan(
            [bench.shape(8192, last_answer_tokens=4)],
            repetitions=4,
            warm_ups=0,
            cold=False,
            settle_seconds=idle_seconds,
        )
        name = f"q8-after-{idle_seconds:g}-s"
        found.keep(name, await bench.rounds("q8-idle", variants, plan))


async def q8_stock(bench: Bench, found: Outcome) -> None:
    """The same beside the bare protocol on stock engines: blocks of 16 tokens, no plugin."""
    await _beside_bare(bench, found, "q8-stock", "q8-stock", {8192: 6, 32768: 6})


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

    The bare protocol runs on the same engines: a second pair does not fit. So the
    connector's proof, well below 1 ms, is in its time too, and so is what kvloop
    does to make engines faster. Turns are traced in a run of their own.
    """
    await _meet(bench, "q32-two-gpus")
    ways = bench.ways["q32-two-gpus"]
    variants = _observed_on_off(bench, found, ways, trace_every=0)
    traced = [_observed(bench, found, ways, "on", ways.turns, reuse=True, trace_every=1)]
    if ways.bare is not None:
        bare = _observed(bench, found, ways, "bare-on", ways.bare, reuse=True)
        variants.append(bare)
        traced.append(bare)
    variants += _over_http(ways)
    for context in (24576, 40960):
        plan = RoundPlan([bench.shape(context)], repetitions=6)
        found.keep(f"two-gpus-{context}", await bench.rounds("two-gpus", variants, plan))
    plan = RoundPlan([bench.shape(24576)], repetitions=5, warm_ups=0)
    found.keep("two-gpus-hops", await bench.rounds("two-gpus-hops", traced, plan))


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
    found.keep("serving", run)
    found.traffic["serving"] = slowdown(seen, run, prefill_legs_only=True).record()


PARTS = {
    "exact": Part(("tiny-float32",), exact),
    "near-ties": Part(("tiny-bfloat16",), near_ties),
    "q8": Part(("q8", "q8-bare"), q8),
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
_TRACED = 3
"""One turn of so many; tracing takes time, and what kvloop adds is told from the others."""
_EIGHT = {"turns": 3, "conversations": 8, "last_answer_tokens": 64}


def _observed(
    bench: Bench,
    found: Outcome,
    ways: Ways,
    name: str,
    turns: TurnRunner,
    *,
    reuse: bool,
    trace_every: int = 0,
) -> Variant:
    """A way of which the outcome's book keeps more than times at the client."""
    observed = ObservedTurns(
        turns, ways.watch, found.book, trace_every=trace_every, wall_clock=bench.wall_clock
    )
    return ways.variant(name, reuse=reuse, turns=observed)


def _observed_on_off(
    bench: Bench, found: Outcome, ways: Ways, *, trace_every: int
) -> list[Variant]:
    """With reuse and without; one in `trace_every` turns is traced, none if that is 0."""
    return [
        _observed(bench, found, ways, name, ways.turns, reuse=reuse, trace_every=trace_every)
        for name, reuse in (("on", True), ("off", False))
    ]


def _over_http(ways: Ways) -> list[Variant]:
    """With reuse, from the client that the bare protocol has."""
    if ways.gateway is None:
        return []
    return [ways.variant(GATEWAY, reuse=True, turns=ways.gateway)]


async def _beside_bare(
    bench: Bench, found: Outcome, name: str, bare_name: str, repetitions: Mapping[int, int]
) -> None:
    """Off and on at some contexts, through kvloop and by the bare protocol.

    Args:
        bench: with the engines "q8".
        found: gets the runs.
        name: begins their names.
        bare_name: of the engines of the bare protocol.
        repetitions: by context.
    """
    await _meet(bench, "q8")
    ours = bench.ways["q8"]
    bare, straight = _bare_way(bench, bare_name, ours)
    if bare is ours:
        found.remarks.append(f"no {bare_name}: the bare protocol ran on kvloop's own engines")
    variants = _observed_on_off(bench, found, ours, trace_every=_TRACED)
    for way, reuse in (("bare-on", True), ("bare-off", False)):
        variants.append(_observed(bench, found, bare, way, straight, reuse=reuse))
    variants += _over_http(ours)
    for context, count in repetitions.items():
        plan = _quick([bench.shape(context)], count)
        found.keep(f"{name}-{context}", await bench.rounds(name, variants, plan))


def _bare_way(bench: Bench, name: str, ours: Ways) -> tuple[Ways, TurnRunner]:
    """The engines of the bare protocol, and what takes turns on them; kvloop's if it has none."""
    bare = bench.ways.get(name, ours)
    return bare, bare.bare if bare is ours and bare.bare is not None else bare.turns


async def _cold_contexts(bench: Bench, found: Outcome, name: str) -> None:
    """Off, on, and off once more at 8k and 32k."""
    await _meet(bench, name)
    variants = on_off(bench.ways[name], control=True)
    for context in (8192, 32768):
        run = await bench.rounds(name, variants, _quick([bench.shape(context)], 5))
        found.keep(f"{name}-{context}", run)
        found.outputs[f"{name}-{context}"] = check_outputs(run)


async def _eight(bench: Bench, found: Outcome, name: str, shape: Shape) -> None:
    """Eight conversations at once, off and on: alone, then beside other requests."""
    ways = bench.ways[name]
    plan = _quick([shape], 3)
    found.keep("eight", await bench.rounds("eight", on_off(ways), plan))
    others = TrafficPlan(requests=4, prompt_tokens=1000, answer_tokens=128)
    async with traffic(
        ways.turns,
        others,
        name=_fresh("traffic", bench),
        source=bench.source,
        clock=bench.clock,
    ) as seen:
        run = await bench.rounds("eight-traffic", on_off(ways), plan)
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


def _quick(shapes: list[Shape], repetitions: int) -> RoundPlan:
    """For a prefill engine without a prefix cache: there is nothing to reset."""
    return RoundPlan(shapes, repetitions=repetitions, cold=False, settle_seconds=0.15)


def _fresh(name: str, bench: Bench) -> str:
    return f"{name}-{bench.source.randrange(1 << 32):08x}"
