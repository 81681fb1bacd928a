"""What a finding is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How bad it is."""

    WRONG = "wrong"
    """Something does not work, or costs more than it gains."""
    ADVICE = "advice"
    """It works, and could work better; or it is worth knowing."""


@dataclass(frozen=True)
class Finding:
    """One thing to know.

    Attributes:
        severity: how bad it is.
        check: which check found it; stable, for programs.
        subject: what it is about: a worker, a pair, a service.
        what: what is the case, in a sentence.
        fix: what to change; empty if there is nothing to do.
    """

    severity: Severity
    check: str
    subject: str
    what: str
    fix: str = ""


def wrong(check: str, subject: str, what: str, fix: str) -> Finding:
    """A finding that needs a change."""
    return Finding(Severity.WRONG, check, subject, what, fix)


def advice(check: str, subject: str, what: str, fix: str = "") -> Finding:
    """A finding that is worth knowing."""
    return Finding(Severity.ADVICE, check, subject, what, fix)
