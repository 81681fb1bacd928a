"""What each policy prefers, and what no policy may do."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloop.kvmeta.v1 import registry_pb2
from services.router.breaker import BreakerState
from services.router.candidates import Candidate, Roster
from services.router.policies import POLICIES, PolicyName
from services.router.policy import DecodeChoice, PrefillChoice, Ranked, TurnFacts
from services.router.rendezvous import favourites
from services.router.settings import RouterSettings
from services.router.speeds import SpeedLines
from services.router.worker_load import DecodeLoad, PrefillLoad
from tests.flow.router.fakes import make_worker
from tests.flow.router.stack import DECODE, PREFILL

D = make_worker("d", DECODE)
NOW = 100.0
every_policy = pytest.mark.parametrize("name", list(PolicyName))


def zero() -> float:
    return 0.0


def prefill(worker_id: str, fleet: SpeedLines | None = None, **fields) -> Candidate:
    return Candidate(make_worker(worker_id, PREFILL), load=PrefillLoad(fleet), **fields)


def decode(worker_id: str, fleet: SpeedLines | None = None, **fields) -> Candidate:
    return Candidate(make_worker(worker_id, DECODE), load=DecodeLoad(fleet), **fields)


def draining(candidate: Candidate) -> Candidate:
    candidate.worker.state = registry_pb2.Worker.STATE_DRAINING
    candidate.registered(candidate.worker)
    return candidate


def for_prefill(
    name: PolicyName,
    *candidates: Candidate,
    facts: TurnFacts | None = None,
    holder: registry_pb2.Worker | None = None,
    rng: Callable[[], float] = zero,
) -> PrefillChoice:
    return PrefillChoice(
        POLICIES[name], Roster(candidates), D, holder, facts or TurnFacts(), NOW, rng
    )


def for_decode(
    name: PolicyName,
    *candidates: Candidate,
    facts: TurnFacts | None = None,
    rng: Callable[[], float] = zero,
) -> DecodeChoice:
    return DecodeChoice(POLICIES[name], Roster(candidates), facts or TurnFacts(), NOW, rng)


def ids(ranking: Sequence[Ranked]) -> list[str]:
    return [entry.worker.worker_id for entry in ranking]


def chosen(choice: PrefillChoice | DecodeChoice) -> str | None:
    worker = choice.choose()
    return worker.worker_id if worker is not None else None


@every_policy
class TestEveryPolicy:
    def test_draining_workers_get_nothing(self, name: PolicyName) -> None:
        assert chosen(for_prefill(name, draining(prefill("a")))) is None
        assert chosen(for_decode(name, draining(decode("a")))) is None
        facts = TurnFacts(holder_id="a", held_tokens=9, prompt_tokens=9)
        assert chosen(for_decode(name, draining(decode("a")), decode("b"), facts=facts)) == "b"

    def test_nobody(self, name: PolicyName) -> None:
        assert for_prefill(name).choose() is None
        assert for_decode(name).choose() is None
        assert for_prefill(name).rank() == for_decode(name).rank() == []

    def test_prefill_that_cannot_be_reached_is_not_usable(self, name: PolicyName) -> None:
        away = prefill("a", reachable=False)
        assert chosen(for_prefill(name, away)) is None
        assert chosen(for_prefill(name, away, prefill("b", in_flight=50))) == "b"

    def test_health_beats_affinity(self, name: PolicyName) -> None:
        facts = TurnFacts(holder_id="a", last_id="a", held_tokens=9, prompt_tokens=9)
        away = decode("a", reachable=False)
        assert chosen(for_decode(name, away, decode("b", in_flight=90), facts=facts)) == "b"
        assert chosen(for_decode(name, away, facts=facts)) == "a"

    def test_prefill_that_cannot_hand_over_is_not_usable(self, name: PolicyName) -> None:
        ranking = for_prefill(name, Candidate(make_worker("a", PREFILL, block_size=64))).rank()
        assert not ranking[0].usable
        assert "block sizes differ" in ranking[0].reason

    def test_one_that_can_pull_beats_one_that_cannot(self, name: PolicyName) -> None:
        other = Candidate(make_worker("a", PREFILL, contract_version=2))
        facts = TurnFacts(prompt_tokens=9000, held_tokens=8000, holder_id="d")
        ranking = for_prefill(name, other, prefill("b"), facts=facts, holder=D).rank()
        assert ids(ranking) == ["b", "a"]
        assert "different versions" in ranking[1].reason
        assert "different versions" not in ranking[0].reason

    def test_the_holder_keeps_its_conversation(self, name: PolicyName) -> None:
        facts = TurnFacts(holder_id="holder", held_tokens=20_000, prompt_tokens=21_000)
        workers = [decode("idle"), decode("holder", in_flight=9), decode("b", in_flight=2)]
        assert chosen(for_decode(name, *workers, facts=facts)) == "holder"

    def test_the_last_one_gets_its_conversation_back(self, name: PolicyName) -> None:
        facts = TurnFacts(last_id="last", prompt_tokens=21_000)
        workers = [decode("idle"), decode("last", in_flight=9), decode("b", in_flight=2)]
        assert chosen(for_decode(name, *workers, facts=facts)) == "last"

    def test_a_holder_with_a_long_queue_is_left(self, name: PolicyName) -> None:
        facts = TurnFacts(holder_id="holder", held_tokens=20_000, prompt_tokens=21_000)
        holder, other = decode("holder", in_flight=1), decode("other")
        holder.load.started(NOW - 30, prompt=100, held=0, in_flight=0)
        choice = for_decode(name, other, holder, facts=facts)
        assert chosen(choice) == "other"
        reason = next(e.reason for e in choice.rank() if e.worker.worker_id == "holder")
        assert reason.startswith("holds the conversation's KV")
        assert "wait" in reason

    def test_ties_are_spread_evenly(self, name: PolicyName) -> None:
        rng = random.Random(7)
        first: Counter[str | None] = Counter()
        for _ in range(400):
            facts = TurnFacts(affinity=rng.getrandbits(64))
            workers = [prefill(worker_id) for worker_id in "abcd"]
            first[chosen(for_prefill(name, *workers, facts=facts, rng=rng.random))] += 1
        assert set(first) == set("abcd")
        assert min(first.values()) > 60

    def test_a_worker_on_trial_is_used_and_shown_as_such(self, name: PolicyName) -> None:
        trial = prefill("a", breaker=BreakerState.HALF_OPEN)
        ranking = for_prefill(name, trial).rank()
        assert ranking[0].usable
        assert ranking[0].reason.endswith("the next turn tries it again")
        tried = prefill("a", breaker=BreakerState.HALF_OPEN, reachable=False)
        assert "is trying it again" in for_prefill(name, tried).rank()[0].reason


class TestLeastLoaded:
    name = PolicyName.LEAST_LOADED

    def test_the_fewest_turns_come_first(self) -> None:
        workers = [prefill("a", in_flight=2), prefill("b", in_flight=1), prefill("c")]
        assert ids(for_prefill(self.name, *workers).rank()) == ["c", "b", "a"]
        others = [decode("a", in_flight=2), decode("b", in_flight=1), decode("c")]
        assert ids(for_decode(self.name, *others).rank()) == ["c", "b", "a"]

    def test_an_idle_worker_that_cannot_pull_waits_for_turns_without_a_handle(self) -> None:
        other = Candidate(make_worker("a", PREFILL, contract_version=2))
        busy = prefill("b", in_flight=50)
        assert chosen(for_prefill(self.name, other, busy, holder=D)) == "b"
        assert chosen(for_prefill(self.name, other, busy)) == "a"


class TestPowerOfTwo:
    name = PolicyName.POWER_OF_TWO

    def test_the_less_busy_of_two_that_are_drawn(self) -> None:
        workers = [
            prefill(worker_id, in_flight=5 - place) for place, worker_id in enumerate("abcde")
        ]
        drawn = iter([0.25, 0.5])  # the second, and from there the third further on
        choice = for_prefill(self.name, *workers, rng=lambda: next(drawn, 0.0))
        assert chosen(choice) == "e"

    def test_the_busiest_is_never_taken_where_there_is_another(self) -> None:
        rng = random.Random(3).random
        workers = [prefill("a", in_flight=9), prefill("b"), prefill("c")]
        taken = {chosen(for_prefill(self.name, *workers, rng=rng)) for _ in range(200)}
        assert taken == {"b", "c"}

    def test_a_single_worker_is_taken(self) -> None:
        assert chosen(for_prefill(self.name, prefill("a"), rng=lambda: 0.99)) == "a"


class TestPrefixAffinity:
    name = PolicyName.PREFIX_AFFINITY

    def places(self, names: str, count: int = 300) -> dict[int, str | None]:
        rng = random.Random(5)
        workers = [prefill(name) for name in names]
        numbers = [rng.getrandbits(64) for _ in range(count)]
        return {
            number: chosen(for_prefill(self.name, *workers, facts=TurnFacts(affinity=number)))
            for number in numbers
        }

    def test_one_beginning_goes_to_one_worker_whatever_else_is_there(self) -> None:
        before, after = self.places("abcd"), self.places("dcba")
        assert before == after

    def test_when_a_worker_leaves_only_its_own_move(self) -> None:
        before, after = self.places("abcd"), self.places("abc")
        assert {old for number, old in before.items() if after[number] != old} == {"d"}

    def test_beginnings_are_spread_evenly(self) -> None:
        counts = Counter(self.places("abcd").values())
        assert min(counts.values()) > 45

    def test_an_overloaded_worker_is_passed_over(self) -> None:
        facts = TurnFacts(affinity=12345)
        workers = [prefill(name) for name in "abcd"]
        favourite = chosen(for_prefill(self.name, *workers, facts=facts))
        for worker in workers:
            worker.in_flight = 8 if worker.worker_id == favourite else 1
        assert chosen(for_prefill(self.name, *workers, facts=facts)) != favourite


class TestFavourites:
    def test_who_stands_in_takes_over_when_the_favourite_cannot(self) -> None:
        workers = [prefill(name) for name in "abcde"]
        first, second = favourites(Roster(workers), 4711)
        next(w for w in workers if w.worker_id == first).reachable = False
        assert favourites(Roster(workers), 4711)[0] == second
        next(w for w in workers if w.worker_id == first).reachable = True
        assert favourites(Roster(reversed(workers)), 4711) == (first, second)

    def test_fewer_workers_fewer_favourites(self) -> None:
        assert favourites(Roster([prefill("a")]), 1) == ("a",)
        assert favourites(Roster([draining(prefill("a"))]), 1) == ()


class TestExpectedTtft:
    name = PolicyName.EXPECTED_TTFT

    def test_a_long_prompt_ahead_counts_for_more_than_short_ones(self) -> None:
        one_long, three_short = prefill("long", in_flight=1), prefill("short", in_flight=3)
        one_long.load.started(NOW, prompt=100_000, held=0, in_flight=0)
        for _ in range(3):
            three_short.load.started(NOW, prompt=100, held=0, in_flight=0)
        facts = TurnFacts(prompt_tokens=1000)
        assert chosen(for_prefill(self.name, one_long, three_short, facts=facts)) == "short"

    def test_a_long_queue_of_those_that_can_pull_makes_recomputing_worth_it(self) -> None:
        other = Candidate(make_worker("a", PREFILL, contract_version=2))
        pulling = prefill("b", in_flight=1)
        facts = TurnFacts(prompt_tokens=9000, held_tokens=8000, holder_id="d")
        pulling.load.started(NOW, prompt=2_000, held=0, in_flight=0)
        assert chosen(for_prefill(self.name, other, pulling, facts=facts, holder=D)) == "b"
        pulling.load.started(NOW, prompt=90_000, held=0, in_flight=1)
        assert chosen(for_prefill(self.name, other, pulling, facts=facts, holder=D)) == "a"

    def test_the_conversation_stays_while_moving_costs_more_than_waiting(self) -> None:
        holder, other = decode("holder"), decode("other")
        holder.load.fading, holder.load.calm_at = 0.05, NOW + 1  # a wait of 50 ms
        held = TurnFacts(holder_id="holder", held_tokens=20_000, prompt_tokens=20_100)
        assert chosen(for_decode(self.name, holder, other, facts=held)) == "holder"
        short = TurnFacts(holder_id="holder", held_tokens=200, prompt_tokens=300)
        assert chosen(for_decode(self.name, holder, other, facts=short)) == "other"

    def test_a_warm_prefix_cache_is_worth_a_short_wait_and_no_long_one(self) -> None:
        warm, cold = prefill("warm"), prefill("cold")
        facts = TurnFacts(
            prompt_tokens=20_000,
            held_tokens=19_000,
            holder_id="d",
            favourites=("warm",),
            cached_shares=(0.9,),
        )
        for wait, expected in ((0.1, "warm"), (5.0, "cold")):
            warm.load.fading, warm.load.calm_at = wait, NOW + 1
            choice = for_prefill(self.name, cold, warm, facts=facts, holder=D)
            assert chosen(choice) == expected
        reason = next(e.reason for e in choice.rank() if e.worker.worker_id == "warm")
        assert "about 17,100 tokens cached" in reason

    def test_reasons_are_figures(self) -> None:
        facts = TurnFacts(prompt_tokens=9000, held_tokens=8000, holder_id="d")
        (entry,) = for_prefill(self.name, prefill("a"), facts=facts, holder=D).rank()
        assert entry.reason == (
            "0 ms waiting, 190 ms pulling 8,000 tokens and computing, 0 turns in flight; "
            "nothing is measured yet"
        )
        (entry,) = for_decode(self.name, decode("d"), facts=facts).rank()
        assert entry.reason == (
            "holds the conversation's KV: 0 ms waiting, 30 ms to read what it lacks, "
            "0 turns in flight; nothing is measured yet"
        )


@st.composite
def fleets(draw, make) -> list[Candidate]:
    fleet = SpeedLines()
    candidates = []
    for place in range(draw(st.integers(1, 6))):
        candidate = make(f"w{place}", fleet, in_flight=draw(st.integers(0, 9)))
        candidate.reachable = draw(st.booleans())
        if draw(st.integers(0, 3)) == 0:
            draining(candidate)
        load = candidate.load
        load.fading, load.calm_at = draw(st.floats(0, 1)), NOW + draw(st.floats(-5, 10))
        for _ in range(draw(st.integers(0, 3))):
            load.started(NOW - draw(st.floats(0, 5)), prompt=500, held=0, in_flight=0)
        candidates.append(candidate)
    return candidates


facts_of_turns = st.builds(
    TurnFacts,
    prompt_tokens=st.integers(0, 50_000),
    held_tokens=st.integers(0, 50_000),
    holder_id=st.sampled_from(["", "w0", "w1"]),
    last_id=st.sampled_from(["", "w0", "w2"]),
    affinity=st.integers(0, 2**64 - 1),
    favourites=st.sampled_from([(), ("w1",), ("w0", "w3")]),
    cached_shares=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)


@every_policy
@given(candidates=fleets(prefill), facts=facts_of_turns, seed=st.integers(0, 99))
def test_the_choice_heads_the_ranking_for_prefill(name, candidates, facts, seed) -> None:
    choice = for_prefill(name, *candidates, facts=facts, rng=random.Random(seed).random)
    again = for_prefill(name, *candidates, facts=facts, rng=random.Random(seed).random)
    taken, ranking = choice.choose(), again.rank()
    assert sorted(ids(ranking)) == sorted(c.worker_id for c in candidates)
    if taken is None:
        assert not any(c.takes_turns and c.reachable for c in candidates)
        assert not any(entry.usable for entry in ranking)
        return
    best = next(entry for entry in ranking if entry.worker is taken)
    assert best.score == ranking[0].score
    assert best.candidate.takes_turns
    assert best.candidate.reachable


@every_policy
@given(candidates=fleets(decode), facts=facts_of_turns, seed=st.integers(0, 99))
def test_the_choice_heads_the_ranking_for_decode(name, candidates, facts, seed) -> None:
    choice = for_decode(name, *candidates, facts=facts, rng=random.Random(seed).random)
    again = for_decode(name, *candidates, facts=facts, rng=random.Random(seed).random)
    taken, ranking = choice.choose(), again.rank()
    assert sorted(ids(ranking)) == sorted(c.worker_id for c in candidates)
    if taken is None:
        assert not any(c.takes_turns for c in candidates)
        return
    best = next(entry for entry in ranking if entry.worker is taken)
    assert best.score == ranking[0].score
    assert best.candidate.takes_turns
    if any(c.takes_turns and c.reachable for c in candidates):
        assert best.candidate.reachable


@given(candidates=fleets(prefill), facts=facts_of_turns)
def test_expected_prefill_is_what_the_load_says(candidates, facts) -> None:
    scores = POLICIES[PolicyName.EXPECTED_TTFT].prefill(candidates, facts, NOW, zero)
    for candidate, score in zip(candidates, scores, strict=True):
        load = candidate.load
        name, prompt = candidate.worker_id, facts.prompt_tokens
        work = load.speeds.prefill(prompt, facts.pullable, facts.cached_at(name))
        next_time = dict(zip(facts.favourites, (1.0, 0.5), strict=False)).get(name, 0.0)
        work -= next_time * load.speeds.prefill(prompt, prompt)
        wait = load.wait(candidate.in_flight, NOW)
        assert score == pytest.approx(work + wait + 0.001 * candidate.in_flight)


@given(candidates=fleets(decode), facts=facts_of_turns)
def test_expected_decode_is_what_the_load_says(candidates, facts) -> None:
    scores = POLICIES[PolicyName.EXPECTED_TTFT].decode(candidates, facts, NOW, zero)
    for candidate, score in zip(candidates, scores, strict=True):
        load, there = candidate.load, facts.tokens_at(candidate.worker_id)
        reading = load.speeds.hand_over(facts.prompt_tokens - there)
        stays = candidate.worker_id in {facts.holder_id, facts.last_id}
        wait = load.wait(candidate.in_flight, NOW)
        expected = reading + wait + 0.001 * candidate.in_flight + (0.0 if stays else 0.02)
        assert score == pytest.approx(expected)


def test_every_name_has_its_policy_and_can_be_set() -> None:
    assert get_args(RouterSettings.model_fields["policy"].annotation) == tuple(PolicyName)
    assert {name: policy.name for name, policy in POLICIES.items()} == {
        n: n.value for n in PolicyName
    }
