"""Reduces samples to what a table shows. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvloop.bench.samples import RoundSample, Run, Sample, Shape
from kvloop.bench.stats import Distribution, distribution, ratio
from kvloop.bench.transfers import Transfers
from kvloop.bench.turns import TurnResult


@dataclass(frozen=True, slots=True)
class Cell:
    """All measurements of one turn of one shape, held one way.

    Attributes:
        shape: size of the conversations.
        turn: number of the turn, from 1.
        variant: way in which they were held.
        ttft: time to the first token at the client, in seconds.
        prefill_leg: part of it spent in the prefill leg, in seconds.
        decode_leg: part of it from the start of the decode leg, in seconds.
        itl: time between two chunks of one answer, in seconds.
        prompt_tokens: median length of the prompt.
        pulled_tokens: median of those pulled.
        cached_tokens: median of those cached on prefill.
        recomputed_tokens: median of those computed.
        retained_tokens: median of those retained after the turn.
        tokens_per_second: generated over the whole of the rounds.
        transfers: what prefill's engine counted, over all rounds; None if unknown.
        misses: how often nothing was pulled, by reason.
        failures: turns that failed.
    """

    shape: Shape
    turn: int
    variant: str
    ttft: Distribution | None
    prefill_leg: Distribution | None
    decode_leg: Distribution | None
    itl: Distribution | None
    prompt_tokens: int
    pulled_tokens: int
    cached_tokens: int
    recomputed_tokens: int
    retained_tokens: int
    tokens_per_second: float
    transfers: Transfers | None
    misses: dict[str, int]
    failures: int

    @property
    def transfer_seconds(self) -> float | None:
        """Mean time of one pull, by the engine's count."""
        return self.transfers.mean_seconds if self.transfers else None

    @property
    def compute_seconds(self) -> float | None:
        """Median prefill leg less the mean pull; None if the legs are not known."""
        if self.prefill_leg is None:
            return None
        return max(self.prefill_leg.p50 - (self.transfer_seconds or 0.0), 0.0)


def cells(run: Run) -> list[Cell]:
    """One cell for each shape, turn and variant, in the order in which they were run."""
    keys: dict[tuple[Shape, int, str], None] = {}
    for sample in run.samples:
        keys[sample.shape, sample.turn, sample.variant] = None
    return [
        _cell(
            key,
            [s for s in run.samples if (s.shape, s.turn, s.variant) == key],
            [r for r in run.rounds if (r.shape, r.turn, r.variant) == key],
        )
        for key in sorted(keys, key=lambda key: _order(key, run))
    ]


def gain(found: Iterable[Cell], cell: Cell, baseline: str = "off") -> float | None:
    """How many times sooner the first token came than in the baseline, at the median.

    Args:
        found: all cells.
        cell: the one to compare.
        baseline: variant to compare with.

    Returns:
        None if one of them has no measurements.
    """
    for other in found:
        if (other.shape, other.turn, other.variant) == (cell.shape, cell.turn, baseline):
            return ratio(_p50(other.ttft), _p50(cell.ttft))
    return None


def _order(key: tuple[Shape, int, str], run: Run) -> tuple[int, int, str]:
    shape, turn, variant = key
    shapes = list(dict.fromkeys(sample.shape for sample in run.samples))
    return shapes.index(shape), turn, variant


def _cell(key: tuple[Shape, int, str], samples: list[Sample], rounds: list[RoundSample]) -> Cell:
    shape, turn, variant = key
    results = [sample.result for sample in samples if sample.result is not None]
    seconds = sum(found.seconds for found in rounds)
    generated = sum(len(result.token_ids) for result in results)
    known = [found.transfers for found in rounds if found.transfers is not None]
    misses: dict[str, int] = {}
    for result in results:
        if result.miss_reason is not None:
            misses[result.miss_reason] = misses.get(result.miss_reason, 0) + 1
    return Cell(
        shape=shape,
        turn=turn,
        variant=variant,
        ttft=distribution([result.ttft_seconds for result in results]),
        prefill_leg=distribution([result.prefill_leg_seconds for result in results]),
        decode_leg=distribution([result.decode_leg_seconds for result in results]),
        itl=distribution([gap for result in results for gap in result.gaps_seconds]),
        prompt_tokens=_median(results, lambda result: result.prompt_tokens),
        pulled_tokens=_median(results, lambda result: result.pulled_tokens),
        cached_tokens=_median(results, lambda result: result.cached_tokens),
        recomputed_tokens=_median(results, lambda result: result.recomputed_tokens),
        retained_tokens=_median(results, lambda result: result.retained_tokens),
        tokens_per_second=generated / seconds if seconds > 0 else 0.0,
        transfers=sum(known, Transfers()) if known else None,
        misses=misses,
        failures=len(samples) - len(results),
    )


def _median(results: list[TurnResult], of: Callable[[TurnResult], int]) -> int:
    found = distribution([of(result) for result in results])
    return round(found.p50) if found else 0


def _p50(found: Distribution | None) -> float | None:
    return found.p50 if found else None
