"""Faults: how they are written, which requests they meet, how often."""

from __future__ import annotations

import msgspec
import pytest

from services.sim.faults import Fault, FaultBook, FaultKind, Leg, parse


def test_a_fault_is_written_with_its_arguments() -> None:
    assert parse("die;after_tokens=3;leg=decode, status;code=500;count=2;probability=0.5") == [
        Fault(FaultKind.DIE, leg=Leg.DECODE, after_tokens=3),
        Fault(FaultKind.STATUS, code=500, count=2, probability=0.5),
    ]


def test_nothing_written_is_no_fault() -> None:
    assert parse(" , ") == []


@pytest.mark.parametrize(
    "text",
    [
        "explode",
        "die;after_tokens",
        "die;after_tokens=x",
        "die;after_tokens=-1",
        "die;seconds=1",
        "status;code=200",
        "hang;probability=2",
        "hang;count=0",
        "hang;unknown=1",
        "hang;leg=both",
    ],
)
def test_a_fault_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        parse(text)


def test_json_and_text_are_the_same_faults() -> None:
    body = b'{"kind": "stall", "after_tokens": 2, "seconds": 1.5, "leg": "prefill"}'
    assert (
        msgspec.json.decode(body, type=Fault)
        == parse("stall;after_tokens=2;seconds=1.5;leg=prefill")[0]
    )


def test_a_fault_meets_requests_of_its_leg_as_often_as_asked() -> None:
    book = FaultBook(0, parse("hang;leg=decode;count=2"))
    assert book.draw(Leg.PREFILL) == []
    drawn = [book.draw(Leg.DECODE) for _ in range(3)]
    assert [len(faults) for faults in drawn] == [1, 1, 0]
    assert book.all() == []
    assert book.applied[FaultKind.HANG] == 2


def test_a_request_brings_its_own_faults_for_its_leg() -> None:
    asked = parse("drop;leg=decode,hang;leg=prefill")
    assert [fault.kind for fault in FaultBook(0).draw(Leg.DECODE, asked)] == [FaultKind.DROP]


def test_a_probability_is_kept_and_repeatable() -> None:
    def run(seed: int) -> list[int]:
        book = FaultBook(seed, parse("drop;probability=0.2"))
        return [len(book.draw(Leg.DECODE)) for _ in range(2000)]

    assert 300 < sum(run(1)) < 500
    assert run(1) == run(1)
    assert run(1) != run(2)


def test_faults_can_be_withdrawn() -> None:
    book = FaultBook(0)
    standing = book.add(Fault(FaultKind.DROP))
    assert book.remove(standing.id)
    assert not book.remove(standing.id)
    book.add(Fault(FaultKind.DROP))
    book.clear()
    assert book.draw(Leg.DECODE) == []
