"""The check of kill -9 tests itself: it passes what can be explained, and nothing else."""

from __future__ import annotations

import pytest

from tests.flow.kvmeta.history_check import Kind, check
from tests.flow.kvmeta.journal import Call, Journal
from tests.flow.kvmeta.ledger_spec import (
    Answer,
    Commit,
    Done,
    End,
    Ended,
    Evict,
    Evicted,
    Extend,
    Freed,
    Given,
    Missed,
    Operation,
    Read,
    ReadReleases,
    Refused,
    Renew,
    Renewed,
    Return,
    Seen,
    Take,
)


class Story:
    """One conversation's calls, one after the other unless said otherwise."""

    def __init__(self) -> None:
        self._journal = Journal()

    def told(self, operation: Operation, answer: Answer, handle_id: str = "") -> Story:
        """A call that is answered before the next begins."""
        self._journal.answered(self._journal.begin("c", operation), answer, handle_id)
        return self

    def began(self, operation: Operation) -> Call:
        """A call that goes on."""
        return self._journal.begin("c", operation)

    def answered(self, call: Call, answer: Answer) -> None:
        """The answer of a call that went on."""
        self._journal.answered(call, answer)

    def broke(self, operation: Operation) -> Story:
        """A call whose answer was lost with the process that worked on it."""
        self._journal.settled(self._journal.begin("c", operation))
        return self

    def verdict(self) -> Kind | None:
        """What the check finds."""
        found = check(self._journal.conversations["c"])
        return found.kind if found else None


def one_handle() -> Story:
    """The first turn has stored a handle."""
    return Story().told(Take("r1"), Missed("FIRST_TURN", 1)).told(Commit("r1", 1), Done(), "h1")


def given_out() -> Story:
    """The second turn holds it."""
    return one_handle().told(Take("r2"), Given("r1", 2), "h1")


def test_turn_after_turn_is_explained() -> None:
    story = given_out().told(Commit("r2", 2), Done(), "h2").told(Take("r3"), Given("r2", 3), "h2")
    story.told(Return("r2", "r3"), Done()).told(Read(), Seen("AVAILABLE", 2, None))
    story.told(Extend(300), Done()).told(Read(), Seen("AVAILABLE", 2, 300))
    story.told(End(), Ended(True, True)).told(Take("r4"), Missed("RELEASED", 4))
    story.told(Commit("r3", 3), Refused("TURN_SUPERSEDED"))
    assert story.told(ReadReleases(), Freed(frozenset({"r2"}))).verdict() is None


def test_either_of_two_racing_takers_may_win() -> None:
    for winner, loser in (("r2", "r3"), ("r3", "r2")):
        story = one_handle()
        calls = {request: story.began(Take(request)) for request in ("r2", "r3")}
        story.answered(calls[loser], Missed("TAKEN", 3))
        story.answered(calls[winner], Given("r1", 2))
        assert story.verdict() is None


def test_both_of_two_racing_takers_are_one_too_many() -> None:
    story = one_handle()
    calls = [story.began(Take(request)) for request in ("r2", "r3")]
    for turn, call in enumerate(calls, start=2):
        story.answered(call, Given("r1", turn))
    assert story.verdict() is Kind.DOUBLED


def test_a_handle_given_out_twice_is_found() -> None:
    assert given_out().told(Take("r3"), Given("r1", 3), "h1").verdict() is Kind.DOUBLED


def test_a_handle_that_came_back_may_be_given_out_again() -> None:
    for back in (
        given_out().told(Return("r1", "r2"), Done()),
        given_out().broke(Return("r1", "r2")),
    ):
        assert back.told(Take("r3"), Given("r1", 3), "h1").verdict() is None


def test_a_refused_return_does_not_excuse_a_second_taker() -> None:
    story = given_out().told(Return("r1", "r9"), Refused("HANDLE_NOT_HELD"))
    assert story.told(Take("r3"), Given("r1", 3), "h1").verdict() is Kind.DOUBLED


def test_a_repeated_take_of_the_holder_is_the_same_handle() -> None:
    assert given_out().told(Take("r2"), Given("r1", 2), "h1").verdict() is None


@pytest.mark.parametrize("reason", ["TAKEN", "FIRST_TURN", "VOID", "EXPIRED"])
def test_a_stored_handle_that_is_gone_is_found(reason: str) -> None:
    assert one_handle().told(Take("r2"), Missed(reason, 2)).verdict() is Kind.LOST


def test_a_stored_handle_that_reads_as_gone_is_found() -> None:
    assert one_handle().told(Read(), Seen("SPENT", 1, None)).verdict() is Kind.LOST


def test_a_take_whose_answer_was_lost_may_have_the_handle_or_not() -> None:
    assert one_handle().broke(Take("r2")).told(Take("r3"), Missed("TAKEN", 3)).verdict() is None
    assert one_handle().broke(Take("r2")).told(Take("r3"), Given("r1", 2)).verdict() is None


def test_a_lost_answer_explains_nothing_once_its_process_is_gone() -> None:
    story = one_handle().broke(Take("r2")).told(Read(), Seen("AVAILABLE", 1, None))
    assert story.told(Take("r3"), Missed("TAKEN", 2)).verdict() is Kind.LOST


def test_a_call_nobody_has_settled_may_be_carried_out_at_any_time() -> None:
    story = one_handle()
    story.began(Take("r2"))
    story.told(Read(), Seen("AVAILABLE", 1, None))
    assert story.told(Take("r3"), Missed("TAKEN", 3)).verdict() is None


def test_a_commit_whose_answer_was_lost_may_be_stored_or_not() -> None:
    for answer in (Given("r2", 3), Missed("TAKEN", 3)):
        assert given_out().broke(Commit("r2", 2)).told(Take("r3"), answer).verdict() is None


def test_a_handle_available_after_having_been_given_out_is_found() -> None:
    story = given_out().told(Read(), Seen("AVAILABLE", 1, None))
    assert story.verdict() is Kind.RESURRECTED


def test_a_released_handle_that_comes_back_is_found() -> None:
    story = one_handle().told(End(), Ended(True, True))
    assert story.told(Read(), Seen("AVAILABLE", 1, None)).verdict() is Kind.RESURRECTED


def test_a_handle_nobody_stored_is_found() -> None:
    assert one_handle().told(Take("r2"), Given("r9", 2), "h1").verdict() is Kind.INVENTED


def test_params_of_another_handle_are_found() -> None:
    story = one_handle().told(Take("r2"), Given("r1", 2), "h2")
    assert story.verdict() is Kind.MIXED_UP


def test_one_id_for_two_handles_is_found() -> None:
    assert given_out().told(Commit("r2", 2), Done(), "h1").verdict() is Kind.MIXED_UP


def test_a_turn_number_that_is_given_twice_is_found() -> None:
    assert given_out().told(Take("r3"), Missed("TAKEN", 2)).verdict() is Kind.UNEXPLAINED


def test_a_forgotten_ttl_is_found() -> None:
    story = one_handle().told(Extend(300), Done())
    assert story.told(Read(), Seen("AVAILABLE", 1, None)).verdict() is Kind.UNEXPLAINED


def test_blocks_freed_while_their_handle_is_out_are_found() -> None:
    story = given_out().told(ReadReleases(), Freed(frozenset({"r1"})))
    assert story.verdict() is Kind.FREED_IN_USE


def test_an_unused_handle_that_is_replaced_has_to_be_freed() -> None:
    replaced = one_handle().told(Commit("r5", 0), Done(), "h5")
    assert replaced.told(ReadReleases(), Freed(frozenset())).verdict() is Kind.LEAKED


def test_a_pin_to_be_freed_while_its_handle_is_out_is_found() -> None:
    assert given_out().told(Renew("r1", 10), Renewed("IN_USE")).verdict() is None
    assert given_out().told(Renew("r1", 10), Renewed("RELEASE")).verdict() is Kind.FREED_IN_USE


def test_an_eviction_of_a_handle_that_is_out_is_found() -> None:
    assert given_out().told(Evict("r1"), Evicted(False)).verdict() is None
    assert given_out().told(Evict("r1"), Evicted(True)).verdict() is Kind.FREED_IN_USE


def test_an_evicted_handle_is_never_given_out() -> None:
    story = one_handle().told(Evict("r1"), Evicted(True)).told(Take("r2"), Missed("EVICTED", 2))
    assert story.told(ReadReleases(), Freed(frozenset({"r1"}))).verdict() is None
    story = one_handle().told(Evict("r1"), Evicted(True)).told(Take("r2"), Given("r1", 2), "h1")
    assert story.verdict() is Kind.UNEXPLAINED
