"""expected_ttft: the least expected time to first token.

A prefill leg takes its wait, then pulling what is held and computing the rest, or
computing everything where that is faster. A decode leg takes its wait, then reading
from prefill what it does not have yet. All from this router's own legs, see
services/router/worker_load.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.router.candidates import Candidate
from services.router.policies.sticking import MARGIN_SECONDS
from services.router.policy import Policy, Rng, Scores, TurnFacts, turns_in_flight

_PER_TURN_SECONDS = 0.001
"""What a turn in flight is taken to cost the next one beyond any wait that shows:
decode steps grow with their batch. Also tells workers apart before any is measured."""
_NEXT_TURN_SHARES = (1.0, 0.5)
"""A prompt that is computed where its conversation belongs, or stands in, need not be
pulled there next time. So much of that pull counts: not every turn has a next one."""


def _prefill(candidates: Sequence[Candidate], facts: TurnFacts, now: float, rng: Rng) -> Scores:
    # `PrefillLoad.wait` and `Speeds.prefill`, written out: calls would take most of
    # the time. A test holds both to each other.
    prompt, held = facts.prompt_tokens, facts.pullable
    pairs, rest = prompt * prompt / 2, prompt - held
    rest_pairs = pairs - held * held / 2
    fleet = candidates[0].load.fleet.speeds
    scores = []
    for candidate in candidates:
        load = candidate.load
        speeds = load.own or fleet
        token, pair = speeds.compute_token, speeds.compute_pair
        score = token * prompt + pair * pairs
        if held:
            pulled = speeds.pull_base + speeds.pull_token * held + token * rest + pair * rest_pairs
            if pulled < score:
                score = pulled
        if load.busy:
            score += abs(load.due_at - now) + load.behind
        if load.calm_at > now:
            score += load.fading * (load.calm_at - now)
        scores.append(score + _PER_TURN_SECONDS * candidate.in_flight)
    for worker_id, share in zip(facts.favourites, _NEXT_TURN_SHARES, strict=False):
        for place, candidate in enumerate(candidates):
            if candidate.worker_id == worker_id:
                scores[place] -= _saved_by_cache(candidate, facts, share)
                break
    return scores


def _saved_by_cache(candidate: Candidate, facts: TurnFacts, next_share: float) -> float:
    """What a favourite's prefix cache is expected to save, now and next time."""
    speeds, prompt, held = candidate.load.speeds, facts.prompt_tokens, facts.pullable
    cached = facts.cached_at(candidate.worker_id)
    now = speeds.prefill(prompt, held) - speeds.prefill(prompt, held, cached)
    return now + next_share * speeds.prefill(prompt, prompt)


def _decode(candidates: Sequence[Candidate], facts: TurnFacts, now: float, rng: Rng) -> Scores:
    # `DecodeLoad.wait` and `Speeds.hand_over`, written out as well.
    prompt = facts.prompt_tokens
    speeds = candidates[0].load.fleet.speeds
    reading = speeds.hand_over(prompt) + MARGIN_SECONDS
    scores = []
    for candidate in candidates:
        load, in_flight = candidate.load, candidate.in_flight
        wait = now - load.due_at
        if load.calm_at > now:
            remembered = load.fading * (load.calm_at - now) * (in_flight + 1)
            if remembered > wait:
                wait = remembered
        score = reading + _PER_TURN_SECONDS * in_flight
        scores.append(score + wait if wait > 0 else score)
    for worker_id in {facts.holder_id, facts.last_id}:
        for place, candidate in enumerate(candidates) if worker_id else ():
            if candidate.worker_id == worker_id:
                scores[place] -= _saved(candidate, facts)
    return scores


def _saved(candidate: Candidate, facts: TurnFacts) -> float:
    """What is saved by staying, the margin included."""
    there = facts.tokens_at(candidate.worker_id)
    return candidate.load.speeds.hand_over_token * there + MARGIN_SECONDS


def _prefill_reason(candidate: Candidate, facts: TurnFacts, now: float) -> str:
    speeds, load, prompt = candidate.load.speeds, candidate.load, facts.prompt_tokens
    wait = load.wait(candidate.in_flight, now)
    cached = facts.cached_at(candidate.worker_id)
    work = speeds.prefill(prompt, facts.pullable, cached)
    words = [f"{_ms(wait)} waiting"]
    if work < speeds.compute(cached, prompt):
        words.append(f"{_ms(work)} pulling {facts.pullable - cached:,} tokens and computing")
    else:
        words.append(f"{_ms(work)} computing")
    if cached:
        words.append(f"about {cached:,} tokens cached")
    return ", ".join([*words, turns_in_flight(candidate)]) + _whose(candidate)


def _decode_reason(candidate: Candidate, facts: TurnFacts, now: float) -> str:
    load, there = candidate.load, facts.tokens_at(candidate.worker_id)
    wait = load.wait(candidate.in_flight, now)
    reading = load.speeds.hand_over(facts.prompt_tokens - there)
    bond = ""
    if candidate.worker_id == facts.holder_id:
        bond = "holds the conversation's KV: "
    elif candidate.worker_id == facts.last_id:
        bond = "served the conversation last: "
    return (
        f"{bond}{_ms(wait)} waiting, {_ms(reading)} to read what it lacks, "
        + turns_in_flight(candidate)
        + _whose(candidate)
    )


def _whose(candidate: Candidate) -> str:
    load = candidate.load
    return "" if load.own is not None or load.fleet.measured else "; nothing is measured yet"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms"


POLICY = Policy(
    name="expected_ttft",
    prefill=_prefill,
    prefill_reason=_prefill_reason,
    decode=_decode,
    decode_reason=_decode_reason,
    weighs_pulls=True,
)
