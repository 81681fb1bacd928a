"""Compares what was generated with reuse and without. Pure functions.

On a GPU in bf16 greedy answers differ between two recomputations too, where two
tokens are nearly as likely. Whether reuse makes more of them is seen only beside a
control: the same turns recomputed once more, with no pull.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvloop.bench.samples import Run, Sample


@dataclass(frozen=True, slots=True)
class OutputCheck:
    """Answers of one variant beside those of the baseline.

    Attributes:
        variant: whose answers were compared.
        compared: pairs of answers to equal prompts.
        equal: of those, pairs with the same tokens.
        first_differences: where the others differ first, counted from 0.
    """

    variant: str
    compared: int
    equal: int
    first_differences: tuple[int, ...]


def check_outputs(run: Run, baseline: str = "off") -> list[OutputCheck]:
    """Compare every variant's answers after the first turn with the baseline's.

    First turns are left out: nothing is pulled for them in any variant.
    """
    expected = {
        _key(sample): sample.result.token_ids
        for sample in run.samples
        if sample.variant == baseline and sample.turn > 1 and sample.result is not None
    }
    variants = dict.fromkeys(s.variant for s in run.samples if s.variant != baseline)
    return [_check(variant, run.samples, expected) for variant in variants]


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs or is missing; None if they are equal."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


def _check(
    variant: str,
    samples: Sequence[Sample],
    expected: dict[tuple[object, ...], tuple[int, ...]],
) -> OutputCheck:
    differences = [
        first_difference(expected[_key(sample)], sample.result.token_ids)
        for sample in samples
        if sample.variant == variant and sample.result is not None and _key(sample) in expected
    ]
    found = tuple(index for index in differences if index is not None)
    return OutputCheck(variant, len(differences), len(differences) - len(found), found)


def _key(sample: Sample) -> tuple[object, ...]:
    """Equal for two ways' answers to one prompt."""
    return (
        sample.shape,
        sample.repetition,
        sample.conversation,
        sample.turn,
        sample.prompt_digest,
    )
