"""Which turns of ways with reuse did not reuse anything. Pure functions.

Decode gives retained KV up when its memory runs short, and prefill may refuse a pull: such
a turn takes as long as one without reuse, and its time says nothing about reuse.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from kvloop.bench.files import sample_records
from kvloop.bench.samples import Run

TurnKey = tuple[str, int, int, int]
"""Way, repetition, conversation and turn: what tells the turns of a run of one shape apart."""
_NOTHING = "0 tokens pulled"
_NO_PULLS = "its prefill engine counted no pull"


def is_with_reuse(way: str) -> bool:
    """Whether a way's name says that its turns reuse: "on", "http-on", "bare-on", ..."""
    return way == "on" or way.endswith("-on")


def missed_reuse(run: Run) -> dict[TurnKey, str]:
    """The turns after the first that should have reused and did not, and why."""
    return missed_in_file(sample_records(run))


def missed_in_file(run: Mapping[str, Any]) -> dict[TurnKey, str]:
    """The same of a run as PART.json has it, under `samples`."""
    pulls = {
        (of["variant"], of["repetition"], of["turn"]): of["transfers"]["count"]
        for of in run.get("rounds", ())
        if of["transfers"] is not None
    }
    found = {}
    for one in run["samples"]:
        result = one["result"]
        if result is None:
            continue
        reason = _why(
            one["variant"],
            one["turn"],
            result["miss_reason"],
            (result["pulled_tokens"], result["cached_tokens"], result["recomputed_tokens"]),
            pulls.get((one["variant"], one["repetition"], one["turn"])),
        )
        if reason is not None:
            found[one["variant"], one["repetition"], one["conversation"], one["turn"]] = reason
    return found


def missed_notes(run: Run) -> Iterator[str]:
    """One sentence for each way with turns that did not reuse."""
    missed = missed_reuse(run)
    for way in dict.fromkeys(key[0] for key in missed):
        reasons = Counter(reason for key, reason in missed.items() if key[0] == way)
        of = sum(s.variant == way and s.turn > 1 and s.result is not None for s in run.samples)
        told = ", ".join(f"{reason}: {count}" for reason, count in reasons.most_common())
        yield (
            f"NO REUSE in {reasons.total()} of {of} turns of `{way}` ({told}): they are left out "
            "of what kvloop adds, and the medians of this way are not those of reuse"
        )


def _why(
    way: str,
    turn: int,
    miss_reason: str | None,
    pulled_cached_recomputed: tuple[int, int, int],
    pulls: int | None,
) -> str | None:
    """Why a turn did not reuse; None if it did, or need not.

    Args:
        way: name of its way.
        turn: its number.
        miss_reason: by receipt.
        pulled_cached_recomputed: tokens; all 0 where there is no receipt, as over HTTP.
        pulls: of its round, by prefill's own count; None if nobody counted.
    """
    if turn < 2 or not is_with_reuse(way):
        return None
    if miss_reason is not None:
        return miss_reason
    if any(pulled_cached_recomputed) and not pulled_cached_recomputed[0]:
        return _NOTHING
    return _NO_PULLS if pulls == 0 else None
