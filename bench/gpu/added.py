"""What kvloop adds to the bare protocol's time to the first token. Pure functions.

Both ways take the same turn in the same repetition, one right after the other, so the
differences of these pairs are told: what drifts between repetitions falls out of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvloop.bench.samples import Run, Shape
from kvloop.bench.stats import percentile
from kvloop.bench.turns import TurnResult

_PAIRS = (("on", "bare-on"), ("off", "bare-off"))


def added(run: Run) -> list[str]:
    """One sentence for each way that has a bare one beside it.

    Args:
        run: rounds with variants "on" and "off", "bare-on" and "bare-off".
    """
    found = []
    for name, bare_name in _PAIRS:
        ours, bare = _last_turns(run, name), _last_turns(run, bare_name)
        both = [(ours[key], bare[key]) for key in ours if key in bare]
        if not both:
            continue
        whole = [(one.ttft_seconds - other.ttft_seconds) * 1e3 for one, other in both]
        legs = [(_legs(one) - _legs(other)) * 1e3 for one, other in both]
        outside = [one.outside_legs_seconds * 1e3 for one, _ in both]
        base = percentile([other.ttft_seconds * 1e3 for _, other in both], 0.5)
        low, middle, high = (percentile(whole, share) for share in (0.25, 0.5, 0.75))
        found.append(
            f"kvloop adds {middle:.1f} ms (quartiles {low:.1f} to {high:.1f}, {len(both)} pairs) "
            f"to the bare protocol's {base:.1f} ms with reuse {name}: "
            f"{percentile(legs, 0.5):+.1f} ms in the legs, "
            f"{percentile(outside, 0.5):.1f} ms outside them"
        )
    return found


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
