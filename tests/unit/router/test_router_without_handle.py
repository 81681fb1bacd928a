"""What is known of a turn for a worker that cannot pull, or once nobody can."""

from __future__ import annotations

import pytest

from services.router.candidates import Candidate, Roster
from services.router.policies import POLICIES, PolicyName
from services.router.policy import PrefillChoice, TurnFacts
from tests.flow.router.fakes import make_worker
from tests.flow.router.stack import DECODE, PREFILL

D = make_worker("d", DECODE)
NOW = 100.0
HELD = TurnFacts(
    prompt_tokens=10_000,
    held_tokens=9000,
    holder_id="d",
    favourites=("a",),
    cached_shares=(0.5,),
)


def zero() -> float:
    return 0.0


def choice(facts: TurnFacts, *candidates: Candidate, holder=D) -> PrefillChoice:
    policy = POLICIES[PolicyName.EXPECTED_TTFT]
    return PrefillChoice(policy, Roster(candidates), D, holder, facts, NOW, zero)


def test_nothing_is_pullable_and_the_holder_has_served_the_conversation_last() -> None:
    without = HELD.without_handle()
    assert (without.pullable, without.holder_id, without.last_id) == (0, "", "d")
    assert (without.prompt_tokens, without.favourites) == (10_000, ("a",))
    assert without.cached_at("a") == 4000  # half of the four fifths that are assumed
    assert HELD.pullable == 9000


def test_who_served_it_last_is_kept_if_that_was_another() -> None:
    facts = TurnFacts(held_tokens=9, prompt_tokens=9, holder_id="d", last_id="e")
    assert facts.without_handle().last_id == "e"


def test_without_a_handle_there_is_nothing_to_take_away() -> None:
    facts = TurnFacts(prompt_tokens=9, last_id="d")
    assert facts.without_handle() is facts


@pytest.mark.parametrize("can_pull", [True, False])
def test_a_prefix_cache_counts_whether_or_not_its_worker_can_pull(can_pull: bool) -> None:
    warm = Candidate(make_worker("a", PREFILL, contract_version=1 if can_pull else 2))
    cold = Candidate(make_worker("b", PREFILL, contract_version=2))
    ranking = choice(HELD, cold, warm).rank()
    assert [entry.worker.worker_id for entry in ranking] == ["a", "b"]
    tokens = "4,500" if can_pull else "4,000"
    assert f"about {tokens} tokens cached" in ranking[0].reason
    assert "cached" not in ranking[1].reason


def test_a_handle_counts_for_nobody_once_it_is_gone() -> None:
    worker = Candidate(make_worker("b", PREFILL))
    (pulling,) = choice(HELD, worker).rank()
    (computing,) = choice(HELD, worker, holder=None).rank()
    assert pulling.score == pytest.approx(0.01 + 0.09 + 0.1)
    assert computing.score == pytest.approx(1.0)
    assert "pulling" in pulling.reason
    assert "pulling" not in computing.reason
