"""Ways of taking turns that are compared with the bare protocol."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from bench.gpu.added import GATEWAY, OWN
from bench.gpu.observed import ObservedTurns
from bench.gpu.outcome import Outcome
from bench.gpu.ways import Bench, Ways
from kvloop.bench.rounds import RoundPlan, Variant
from kvloop.bench.turns import TurnRunner

_TRACED = 4
"""One turn of so many; tracing takes time, and what kvloop adds is told from the others."""
_SETTLE_SECONDS = 0.1
_LAST_ANSWER_TOKENS = 8
"""First tokens are compared: a few more show the time between them."""


def observed(
    bench: Bench,
    found: Outcome,
    ways: Ways,
    name: str,
    turns: TurnRunner,
    *,
    reuse: bool = True,
    trace_every: int = 0,
) -> Variant:
    """A way of which the outcome's book keeps more than times at the client.

    Args:
        bench: has the clock.
        found: has the book.
        ways: the engines.
        name: of the way.
        turns: takes its turns.
        reuse: whether they reuse.
        trace_every: one in so many turns is traced, none if it is 0.
    """
    watched = ObservedTurns(
        turns, ways.watch, found.book, trace_every=trace_every, wall_clock=bench.wall_clock
    )
    return ways.variant(name, reuse=reuse, turns=watched)


def through_kvloop(
    bench: Bench, found: Outcome, ways: Ways, *, trace_every: int = 0
) -> list[Variant]:
    """With reuse, which leads the history, and without; with reuse over HTTP, from the
    client that the bare protocol has."""
    made = [
        observed(bench, found, ways, name, ways.turns, reuse=reuse, trace_every=trace_every)
        for name, reuse in (("on", True), ("off", False))
    ]
    if ways.gateway is not None:
        made.append(observed(bench, found, ways, GATEWAY, ways.gateway))
    return made


def on_own_engines(bench: Bench, found: Outcome, ways: Ways) -> list[Variant]:
    """The bare protocol on kvloop's engines: what `on` takes longer is kvloop's services."""
    return [] if ways.bare is None else [observed(bench, found, ways, OWN, ways.bare)]


async def beside_bare(
    bench: Bench,
    found: Outcome,
    name: str,
    bare_name: str,
    repetitions: Mapping[int, int],
    *,
    own: bool = True,
    bare_off: Collection[int],
) -> None:
    """Off and on at some contexts, through kvloop and by the bare protocol.

    Args:
        bench: with the engines "q8".
        found: gets the runs.
        name: begins their names.
        bare_name: of the engines of the bare protocol, which have no code of kvloop.
        repetitions: by context.
        own: whether the bare protocol is held on kvloop's own engines too; it is where
            it has no others.
        bare_off: contexts at which the bare protocol goes without reuse too.
    """
    ours, bare = bench.ways["q8"], bench.ways.get(bare_name)
    variants = through_kvloop(bench, found, ours, trace_every=_TRACED)
    if own or bare is None:
        variants += on_own_engines(bench, found, ours)
    if bare is None:
        found.remarks.append(
            f"no {bare_name}: nothing tells what kvloop adds to engines without its code"
        )
    else:
        for way, reuse in (("bare-on", True), ("bare-off", False)):
            variants.append(observed(bench, found, bare, way, bare.turns, reuse=reuse))
    for context, count in repetitions.items():
        taken = [v for v in variants if v.name != "bare-off" or context in bare_off]
        plan = RoundPlan(
            [bench.shape(context, last_answer_tokens=_LAST_ANSWER_TOKENS)],
            repetitions=count,
            cold=False,  # no prefix cache that could be emptied
            settle_seconds=_SETTLE_SECONDS,
        )
        found.keep(f"{name}-{context}", await bench.rounds(name, taken, plan))
