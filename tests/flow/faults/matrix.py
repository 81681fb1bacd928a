"""Reads the cases of docs/fault-matrix.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.flow.faults.cases import Act, Case, NoCase, Step
from tests.flow.faults.turns import GONE, PULLED, RIGHT
from tests.flow.faults.world import IMPATIENT, UNHEARD, Setup

PAGE = Path(__file__).parents[3] / "docs" / "fault-matrix.md"
HEADER = ["step", "what happens", "the client gets", "reuse", "its own KV", "counted besides"]
HEADER.append("next turn")
HANG = "hang"
_NO_EVENT = "`NO_EVENT`"

_WORDS = {"": "", "right answer": RIGHT, "nothing more": GONE, "retained": "RETAINED"}
_EVERYWHERE = " everywhere"
_POLICY = ", policy "


def read(page: str) -> list[Case | NoCase]:
    """The cases of a page, and the faults that do not meet a step."""
    _, *sections = re.split(r"^## ", page, flags=re.MULTILINE)
    return [entry for section in sections for entry in _section(section)]


def _section(section: str) -> Iterator[Case | NoCase]:
    fault, *lines = section.splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[:1] == "|"]
    assert rows[0] == HEADER, fault
    for row in rows[2:]:
        yield _case(fault, *row)
    for line in lines:
        if line.startswith("- "):
            step, _, why = line[2:].partition(": ")
            yield NoCase(fault, Step(step), why)


def _case(
    fault: str, step: str, what: str, answer: str, reuse: str, kept: str, counts: str, then: str
) -> Case:
    what, _, policy = what.partition(_POLICY)
    strike = what.removesuffix(_EVERYWHERE)
    if policy:
        setup = Setup(policy=policy)
    elif kept == _NO_EVENT:
        setup = UNHEARD
    else:
        setup = IMPATIENT if fault == HANG else Setup()
    return Case(
        fault,
        Step(step),
        _code(strike) if strike.startswith("`") else Act(strike),
        answer=_word(answer),
        reuse=_word(reuse),
        kept=_word(kept),
        counts=dict.fromkeys(counts.split(", "), 1) if counts else {},
        then=_word(then),
        everywhere=what.endswith(_EVERYWHERE),
        setup=setup,
    )


def _word(cell: str) -> str:
    """Names are in code; words of the page stand for others."""
    if cell.startswith("`"):
        return _code(cell)
    return cell if cell == PULLED else _WORDS[cell]


def _code(cell: str) -> str:
    return cell.removeprefix("`").removesuffix("`")


ENTRIES = read(PAGE.read_text())
CASES = [entry for entry in ENTRIES if isinstance(entry, Case)]
