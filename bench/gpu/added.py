"""What kvloop adds to the bare protocol's time to the first token. Pure functions.

Both ways take the same turn in the same repetition, one right after the other, so the
differences of these pairs are told: what drifts between repetitions falls out of them.
A pair of which one should have reused and did not is left out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from bench.gpu.reuse import missed_reuse
from kvloop.bench.samples import Run, Shape
from kvloop.bench.stats import percentile
from kvloop.bench.turns import TurnResult

GATEWAY = "http-on"
"""Name of the variant whose last turns go over the router's HTTP front, with reuse."""
OWN = "own-on"
"""Name of the variant that is the bare protocol on kvloop's own engines, with reuse."""
_WORDS = {"on": "with reuse on", "off": "with reuse off", GATEWAY: "with reuse on, over HTTP"}
_SERVICES = ("kvloop's services alone add", "on kvloop's own engines")
_ALL = ("kvloop with all it makes of its engines adds", "on engines without any code of kvloop")


@dataclass(frozen=True, slots=True)
class Comparison:
    """A way of kvloop and the bare one that it is compared with.

    Attributes:
        way: name of kvloop's variant.
        bare: name of the bare protocol's.
    """

    way: str
    bare: str

    @property
    def has_legs(self) -> bool:
        """Whether the way tells of its legs: a stream over HTTP ends without a receipt."""
        return self.way != GATEWAY


COMPARISONS = (
    Comparison("on", "bare-on"),
    Comparison("on", OWN),
    Comparison("off", "bare-off"),
    Comparison(GATEWAY, "bare-on"),
    Comparison(GATEWAY, OWN),
)
"""All that are made, in runs that have both."""


def bare_pairs(run: Run, compared: Comparison) -> list[tuple[TurnResult, TurnResult]]:
    """The last turns of one way, each with the bare one of its repetition.

    Args:
        run: rounds with variants such as "on" and "bare-on".
        compared: which two of them.
    """
    ours, bare = _last_turns(run, compared.way), _last_turns(run, compared.bare)
    return [(ours[key], bare[key]) for key in ours if key in bare]


def added(run: Run, traced: Collection[str] = ()) -> list[str]:
    """One sentence for each way and bare one beside it, and one for its traced turns.

    Args:
        run: rounds with variants such as "on" and "bare-on".
        traced: record ids of turns that were traced, which itself takes time.
    """
    found = []
    for compared in COMPARISONS:
        pairs = bare_pairs(run, compared)
        for words, both in (
            ("", [pair for pair in pairs if pair[0].record_id not in traced]),
            ("traced, ", [pair for pair in pairs if pair[0].record_id in traced]),
        ):
            if both:
                found.append(words + _sentence(both, compared))
    return found


def _sentence(both: Sequence[tuple[TurnResult, TurnResult]], compared: Comparison) -> str:
    whole = [(one.ttft_seconds - other.ttft_seconds) * 1e3 for one, other in both]
    base = percentile([other.ttft_seconds * 1e3 for _, other in both], 0.5)
    low, middle, high = (percentile(whole, share) for share in (0.25, 0.5, 0.75))
    who, where = _SERVICES if compared.bare == OWN else _ALL
    said = (
        f"{who} {middle:.1f} ms (quartiles {low:.1f} to {high:.1f}, {len(both)} pairs) "
        f"to the bare protocol's {base:.1f} ms {where}, {_WORDS[compared.way]}"
    )
    return f"{said}: {_legs_told(both)}" if compared.has_legs else said


def _legs_told(both: Sequence[tuple[TurnResult, TurnResult]]) -> str:
    legs = [(_legs(one) - _legs(other)) * 1e3 for one, other in both]
    outside = [one.outside_legs_seconds * 1e3 for one, _ in both]
    return (
        f"{percentile(legs, 0.5):+.1f} ms in the legs, "
        f"{percentile(outside, 0.5):.1f} ms outside them"
    )


def _last_turns(run: Run, variant: str) -> Mapping[tuple[object, ...], TurnResult]:
    missed = missed_reuse(run)
    return {
        (sample.shape, sample.repetition, sample.conversation): sample.result
        for sample in run.samples
        if sample.variant == variant
        and sample.result is not None
        and isinstance(sample.shape, Shape)
        and sample.turn == sample.shape.turns
        and (variant, sample.repetition, sample.conversation, sample.turn) not in missed
    }


def _legs(result: TurnResult) -> float:
    return result.prefill_leg_seconds + result.decode_leg_seconds
