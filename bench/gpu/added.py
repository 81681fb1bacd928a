"""What kvloop adds to the bare protocol's time to the first token. Pure functions.

Both ways take the same turn in the same repetition, one right after the other, so the
differences of these pairs are told: what drifts between repetitions falls out of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from kvloop.bench.samples import Run, Shape
from kvloop.bench.stats import percentile
from kvloop.bench.turns import TurnResult

WAYS = ("on", "off")
"""Names of the variants that tell of their legs and may have a bare one beside them."""
GATEWAY = "http-on"
"""Name of the variant whose last turns go over the router's HTTP front, with reuse."""
_BARE = {"on": "bare-on", "off": "bare-off", GATEWAY: "bare-on"}
_WORDS = {"on": "with reuse on", "off": "with reuse off", GATEWAY: "with reuse on, over HTTP"}


def bare_pairs(run: Run, way: str) -> list[tuple[TurnResult, TurnResult]]:
    """The last turns of one way, each with the bare one of its repetition.

    Args:
        run: rounds with variants such as "on" and "bare-on".
        way: name of its variant.
    """
    ours, bare = _last_turns(run, way), _last_turns(run, _BARE[way])
    return [(ours[key], bare[key]) for key in ours if key in bare]


def added(run: Run, traced: Collection[str] = ()) -> list[str]:
    """One sentence for each way that has a bare one beside it, and one for its traced turns.

    Args:
        run: rounds with variants such as "on" and "bare-on".
        traced: record ids of turns that were traced, which itself takes time.
    """
    found = []
    for way in _BARE:
        pairs = bare_pairs(run, way)
        for words, both in (
            ("", [pair for pair in pairs if pair[0].record_id not in traced]),
            ("traced, ", [pair for pair in pairs if pair[0].record_id in traced]),
        ):
            if both:
                found.append(words + _sentence(both, way))
    return found


def _sentence(both: Sequence[tuple[TurnResult, TurnResult]], way: str) -> str:
    whole = [(one.ttft_seconds - other.ttft_seconds) * 1e3 for one, other in both]
    base = percentile([other.ttft_seconds * 1e3 for _, other in both], 0.5)
    low, middle, high = (percentile(whole, share) for share in (0.25, 0.5, 0.75))
    said = (
        f"kvloop adds {middle:.1f} ms (quartiles {low:.1f} to {high:.1f}, {len(both)} pairs) "
        f"to the bare protocol's {base:.1f} ms, {_WORDS[way]}"
    )
    return said if way == GATEWAY else f"{said}: {_where(both)}"


def _where(both: Sequence[tuple[TurnResult, TurnResult]]) -> str:
    legs = [(_legs(one) - _legs(other)) * 1e3 for one, other in both]
    outside = [one.outside_legs_seconds * 1e3 for one, _ in both]
    return (
        f"{percentile(legs, 0.5):+.1f} ms in the legs, "
        f"{percentile(outside, 0.5):.1f} ms outside them"
    )


def _last_turns(run: Run, variant: str) -> Mapping[tuple[object, ...], TurnResult]:
    return {
        (sample.shape, sample.repetition, sample.conversation): sample.result
        for sample in run.samples
        if sample.variant == variant
        and sample.result is not None
        and isinstance(sample.shape, Shape)
        and sample.turn == sample.shape.turns
    }


def _legs(result: TurnResult) -> float:
    return result.prefill_leg_seconds + result.decode_leg_seconds
