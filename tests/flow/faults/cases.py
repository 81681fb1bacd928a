"""What a case of the fault matrix is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from tests.flow.faults.turns import GONE, PULLED, RIGHT
from tests.flow.faults.world import Setup


class Step(StrEnum):
    """A moment of a turn."""

    BEFORE_P = "before P"
    """The turn has not reached a prefill engine."""
    IN_P = "in P"
    """Prefill works, or pulls from decode."""
    BETWEEN = "between P and D"
    """Prefill has handed over, decode's engine has not seen the turn."""
    BEFORE_FIRST_BYTE = "before D's first byte"
    """Decode works, or pulls from prefill."""
    MID_STREAM = "mid-stream"
    """The client has the first tokens."""
    AT_COMMIT = "at commit"
    """The engine is done, the ledger does not have the turn's handle yet."""


class Act(StrEnum):
    """What is done to a service, an engine or the client while a turn is at a step."""

    P_REFUSES = "prefill's engine takes no connections"
    D_REFUSES = "decode's engine takes no connections"
    P_RESTARTS = "prefill's engine is another one"
    D_RESTARTS = "decode's engine is another one"
    KVMETA_KILLED = "kvmeta is killed"
    KVMETA_HANGS = "kvmeta is stopped"
    KVMETA_MUTE = "kvmeta's replies get lost"
    KVMETA_LEAVES = "kvmeta gets SIGTERM"
    P_SIDECAR_KILLED = "prefill's sidecar is killed"
    D_SIDECAR_KILLED = "decode's sidecar is killed"
    P_SIDECAR_LEAVES = "prefill's sidecar gets SIGTERM"
    D_SIDECAR_LEAVES = "decode's sidecar gets SIGTERM"
    ROUTER_LEAVES = "the router gets SIGTERM"
    CLIENT_LEAVES = "the client hangs up"


@dataclass(frozen=True)
class Case:
    """One fault at one step, and what comes of it."""

    fault: str
    """Name of the kind of fault."""
    step: Step
    strike: Act | str
    """What is done, or the fault that an engine meets, as services/sim/faults.py
    writes it. The engine is that of the fault's leg."""
    answer: str
    """What the client gets: RIGHT, GONE, or the reason of its error."""
    reuse: str
    """PULLED, or the reason of the miss; empty if the turn is not answered."""
    kept: str
    """What became of the turn's own KV; empty likewise."""
    counts: Mapping[str, int]
    """Fallbacks and returned handles that the router counts, by name."""
    then: str
    """Reuse of the next turn, when all is well again."""
    everywhere: bool
    """All engines of the leg meet the fault, not only the one that is asked first."""
    setup: Setup
    """Settings that the case needs."""

    @property
    def name(self) -> str:
        """Name of the test."""
        where = f"{self.strike}, everywhere" if self.everywhere else str(self.strike)
        more = f", policy {self.setup.policy}" if self.setup.policy != "recompute" else ""
        return f"{self.fault} | {self.step} | {where}{more}"

    def counted(self) -> dict[str, int]:
        """All that is counted for the turn."""
        if self.answer == RIGHT:
            how = {"turn answered": 1}
            if self.reuse != PULLED:
                how[f"miss {self.reuse.lower()}"] = 1
        elif self.answer == GONE:
            how = {"turn cancelled": 1}
        else:
            how = {
                f"turn {_ENDS.get(self.answer, 'failed')}": 1,
                f"error {self.answer.lower()}": 1,
            }
        return how | dict(self.counts)


_ENDS = {"ENGINE_REJECTED": "rejected"}
"""How the router calls the end of turns that fail by the request's fault."""


@dataclass(frozen=True)
class NoCase:
    """A fault and a step that do not meet, and why."""

    fault: str
    step: Step
    why: str
