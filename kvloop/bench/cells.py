"""Reduces samples to what a table shows. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvloop.bench.samples import KvBlocks, Load, RoundSample, Run, Sample, Shape
from kvloop.bench.stats import Distribution, distribution, ratio
from kvloop.bench.transfers import Transfers
from kvloop.bench.turns import TurnResult

LATER_TURNS = 0
"""In place of a turn's number: all turns but first ones."""
_LEAST_BUCKET = 1024
_MOST_TURNS = 12
"""Turns of a workload that get cells of their own."""


@dataclass(frozen=True, slots=True)
class CellKey:
    """Which turns a cell gathers.

    Attributes:
        shape: what they are part of.
        turn: number of the turn, from 1, or LATER_TURNS.
        context: prompts have at most this many tokens, and more than half as many; None
            if prompts of all lengths count.
        variant: way in which they were held.
    """

    shape: Load
    turn: int
    context: int | None
    variant: str


@dataclass(frozen=True, slots=True)
class Cell:
    """All measurements of some turns, held one way.

    Attributes:
        key: which turns.
        ttft: time to the first token at the client, in seconds.
        prefill_leg: part of it spent in the prefill leg, in seconds.
        decode_leg: part of it from the start of the decode leg, in seconds.
        outside_legs: part of it that neither leg had, in seconds.
        itl: time between two chunks of one answer, in seconds.
        pull: time of one pull as receipts tell it, in seconds.
        prompt_tokens: median length of the prompt.
        pulled_tokens: median of those pulled.
        cached_tokens: median of those cached on prefill.
        recomputed_tokens: median of those computed.
        retained_tokens: median of those retained after the turn.
        retained_blocks: most KV blocks that the ledger knew to be retained at once;
            None if it was not asked.
        tokens_per_second: generated over the whole of the rounds; None where turns of
            several cells ran at once.
        moved_bytes: pulled, by receipts and the size of KV blocks; None if unknown.
        transfers: what prefill's engine counted, over all rounds; None if unknown.
        misses: how often nothing was pulled, by reason.
        failures: turns that failed.
    """

    key: CellKey
    ttft: Distribution | None
    prefill_leg: Distribution | None
    decode_leg: Distribution | None
    outside_legs: Distribution | None
    itl: Distribution | None
    pull: Distribution | None
    prompt_tokens: int
    pulled_tokens: int
    cached_tokens: int
    recomputed_tokens: int
    retained_tokens: int
    retained_blocks: int | None
    tokens_per_second: float | None
    moved_bytes: int | None
    transfers: Transfers | None
    misses: dict[str, int]
    failures: int

    @property
    def shape(self) -> Load:
        """What its turns are part of."""
        return self.key.shape

    @property
    def turn(self) -> int:
        """Number of its turns, from 1, or LATER_TURNS."""
        return self.key.turn

    @property
    def variant(self) -> str:
        """Way in which they were held."""
        return self.key.variant

    @property
    def is_last(self) -> bool:
        """True if it tells of what reuse gains at one length of the context."""
        if isinstance(self.shape, Shape):
            return self.turn == self.shape.turns
        return self.key.context is not None

    @property
    def transfer_seconds(self) -> float | None:
        """Time of one pull: the engine's mean, or else the median of receipts."""
        counted = self.transfers.mean_seconds if self.transfers else None
        return counted if counted is not None else self.pull.p50 if self.pull else None

    @property
    def compute_seconds(self) -> float | None:
        """Median prefill leg less the pull; None if the legs are not known."""
        if self.prefill_leg is None:
            return None
        return max(self.prefill_leg.p50 - (self.transfer_seconds or 0.0), 0.0)

    @property
    def pulled_bytes(self) -> float | None:
        """Bytes of all pulls, by the engine's count or else by receipts."""
        return self.transfers.bytes if self.transfers else self.moved_bytes

    @property
    def bytes_per_second(self) -> float | None:
        """Bandwidth of pulls, by the engine's count or else by receipts, whose time also
        has the wait for the engine's next step."""
        if self.transfers is not None:
            return self.transfers.bytes_per_second
        seconds = self.pull.mean * self.pull.count if self.pull else 0.0
        return self.moved_bytes / seconds if self.moved_bytes and seconds else None


def cells(run: Run) -> list[Cell]:
    """One cell for each shape, turn and variant, in the order in which they were run.

    Of workloads there is one for each turn and variant, for all turns but first ones, and
    for these by the length of their prompts.
    """
    gathered: dict[CellKey, list[Sample]] = {}
    for sample in run.samples:
        for key in _keys(sample):
            gathered.setdefault(key, []).append(sample)
    shapes = list(dict.fromkeys(sample.shape for sample in run.samples))
    return [
        _cell(key, gathered[key], _rounds(key, run), run)
        for key in sorted(gathered, key=lambda key: _order(key, shapes))
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
    wanted = CellKey(cell.key.shape, cell.key.turn, cell.key.context, baseline)
    for other in found:
        if other.key == wanted:
            return ratio(_p50(other.ttft), _p50(cell.ttft))
    return None


def _keys(sample: Sample) -> list[CellKey]:
    """The cells that a sample belongs to."""
    shape, turn, variant = sample.shape, sample.turn, sample.variant
    if isinstance(shape, Shape):
        return [CellKey(shape, turn, None, variant)]
    keys = [CellKey(shape, turn, None, variant)] if turn <= _MOST_TURNS else []
    if turn > 1:
        keys.append(CellKey(shape, LATER_TURNS, None, variant))
        if sample.result is not None:
            bucket = _bucket(sample.result.prompt_tokens)
            keys.append(CellKey(shape, LATER_TURNS, bucket, variant))
    return keys


def _bucket(tokens: int) -> int:
    """The next power of two."""
    return max(1 << (tokens - 1).bit_length(), _LEAST_BUCKET)


def _rounds(key: CellKey, run: Run) -> list[RoundSample]:
    """Rounds of exactly those turns."""
    if key.context is not None:
        return []
    return [
        found
        for found in run.rounds
        if (found.shape, found.turn, found.variant) == (key.shape, key.turn, key.variant)
    ]


def _order(key: CellKey, shapes: Sequence[Load]) -> tuple[int, bool, int, int, str]:
    """Shapes as they were run; of workloads turns, then all later ones, then lengths."""
    later = key.turn == LATER_TURNS
    return shapes.index(key.shape), later, key.turn, key.context or 0, key.variant


def _throughput(key: CellKey, samples: list[Sample], rounds: list[RoundSample], run: Run) -> float:
    """Tokens generated per second of the rounds, by all that ran in them; 0 without any."""
    if not isinstance(key.shape, Shape):  # first turns too run while a workload is held
        samples = [s for s in run.samples if (s.shape, s.variant) == (key.shape, key.variant)]
    generated = sum(sample.result.generated_tokens for sample in samples if sample.result)
    seconds = sum(found.seconds for found in rounds)
    return generated / seconds if seconds > 0 else 0.0


def _cell(key: CellKey, samples: list[Sample], rounds: list[RoundSample], run: Run) -> Cell:
    blocks: KvBlocks | None = run.blocks
    results = [sample.result for sample in samples if sample.result is not None]
    known = [found.transfers for found in rounds if found.transfers is not None]
    retained = [found.retained_blocks for found in rounds if found.retained_blocks is not None]
    misses: dict[str, int] = {}
    for result in results:
        if result.miss_reason is not None:
            misses[result.miss_reason] = misses.get(result.miss_reason, 0) + 1
    moved = sum(blocks.bytes_of(result.pulled_tokens) for result in results) if blocks else 0
    return Cell(
        key=key,
        ttft=distribution([result.ttft_seconds for result in results]),
        prefill_leg=distribution([result.prefill_leg_seconds for result in results]),
        decode_leg=distribution([result.decode_leg_seconds for result in results]),
        outside_legs=distribution([result.outside_legs_seconds for result in results]),
        itl=distribution([gap for result in results for gap in result.gaps_seconds]),
        pull=distribution([r.pull_seconds for r in results if r.pull_seconds is not None]),
        prompt_tokens=_median(results, lambda result: result.prompt_tokens),
        pulled_tokens=_median(results, lambda result: result.pulled_tokens),
        cached_tokens=_median(results, lambda result: result.cached_tokens),
        recomputed_tokens=_median(results, lambda result: result.recomputed_tokens),
        retained_tokens=_median(results, lambda result: result.retained_tokens),
        retained_blocks=max(retained, default=None),
        tokens_per_second=_throughput(key, samples, rounds, run) or None,
        moved_bytes=moved or None,
        transfers=sum(known, Transfers()) if known else None,
        misses=misses,
        failures=len(samples) - len(results),
    )


def _median(results: list[TurnResult], of: Callable[[TurnResult], int]) -> int:
    found = distribution([of(result) for result in results])
    return round(found.p50) if found else 0


def _p50(found: Distribution | None) -> float | None:
    return found.p50 if found else None
