"""Faults that can be asked for: what they are, how they are written, when they apply.

A fault is written `kind;key=value;key=value`, several separated by commas, in
the request header X-Sim-Fault, in the body as `vllm_xargs.sim_fault` (which
passes through routers), in --fault, or as JSON with the same names to
POST /sim/faults. docs/sim-engine.md has the table.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

HEADER = "x-sim-fault"
XARG = "sim_fault"


class Leg(StrEnum):
    """Which leg of a turn a request is."""

    ANY = "any"
    PREFILL = "prefill"
    DECODE = "decode"


class FaultKind(StrEnum):
    """What goes wrong."""

    STATUS = "status"
    """An error reply with `code`, before the engine sees the request."""
    DROP = "drop"
    """The connection is closed without a reply."""
    HANG = "hang"
    """No reply for `seconds`; 0: ever."""
    SLOW_FIRST_BYTE = "slow_first_byte"
    """The engine works, but the reply starts `seconds` late."""
    DIE = "die"
    """The connection is closed after `after_tokens` tokens, the request aborted."""
    STALL = "stall"
    """The stream pauses for `seconds` after `after_tokens` tokens; 0: for good."""
    STREAM_ERROR = "stream_error"
    """An error event after `after_tokens` tokens, as when vLLM's engine fails."""
    BYTE_BY_BYTE = "byte_by_byte"
    """The reply is written one byte at a time."""
    CRLF = "crlf"
    """Events of the stream end in CRLF."""
    COMMENTS = "comments"
    """Keep-alive comments between the events of the stream."""
    LOSE_HANDSHAKE = "lose_handshake"
    """The pull's handshake with the other engine fails."""
    FAIL_TRANSFER = "fail_transfer"
    """The pull is started and fails."""
    SLOW_TRANSFER = "slow_transfer"
    """The pull takes `seconds` longer."""
    NO_EVENT = "no_event"
    """The connector does not report the finished turn."""
    DELAY_EVENT = "delay_event"
    """The connector reports the finished turn `seconds` late."""
    REFUSE = "refuse"
    """The engine takes no connections for `seconds`, beginning with this reply."""
    RESTART = "restart"
    """The engine dies after `after_tokens` tokens, `seconds` later there is a new
    one in its place: other engine id and epoch, empty cache."""
    EXIT = "exit"
    """The engine dies after `after_tokens` tokens and stays away."""


_ARGUMENTS: Mapping[FaultKind, frozenset[str]] = {
    FaultKind.STATUS: frozenset({"code", "message"}),
    FaultKind.HANG: frozenset({"seconds"}),
    FaultKind.SLOW_FIRST_BYTE: frozenset({"seconds"}),
    FaultKind.DIE: frozenset({"after_tokens"}),
    FaultKind.STALL: frozenset({"after_tokens", "seconds"}),
    FaultKind.STREAM_ERROR: frozenset({"after_tokens"}),
    FaultKind.SLOW_TRANSFER: frozenset({"seconds"}),
    FaultKind.DELAY_EVENT: frozenset({"seconds"}),
    FaultKind.REFUSE: frozenset({"seconds"}),
    FaultKind.RESTART: frozenset({"after_tokens", "seconds"}),
    FaultKind.EXIT: frozenset({"after_tokens"}),
}


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One fault and the requests that it applies to."""

    kind: FaultKind
    leg: Leg = Leg.ANY
    count: int | None = None
    """Requests that it applies to, at most; None: all."""
    probability: float = 1.0
    """Share of the matching requests that it applies to."""
    seconds: float = 0.0
    after_tokens: int = 0
    code: int = 503
    message: str = "injected fault"

    def __post_init__(self) -> None:
        """Refuse what makes no sense.

        Raises:
            ValueError: a value is out of range, or the kind does not use it.
        """
        if not 0 <= self.probability <= 1:
            raise ValueError("probability must be 0 to 1")
        if self.count is not None and self.count < 1:
            raise ValueError("count must be at least 1")
        if self.seconds < 0 or self.after_tokens < 0:
            raise ValueError("seconds and after_tokens must not be negative")
        if not 400 <= self.code <= 599:
            raise ValueError("code must be 400 to 599")
        used = _ARGUMENTS.get(self.kind, frozenset())
        for name in ("seconds", "after_tokens", "code", "message"):
            if name not in used and getattr(self, name) != _default(name):
                raise ValueError(f"a {self.kind} fault has no {name}")

    def concerns(self, leg: Leg) -> bool:
        """True if requests of this leg are meant."""
        return self.leg in (Leg.ANY, leg)


def _default(name: str) -> Any:
    return next(field.default for field in msgspec.structs.fields(Fault) if field.name == name)


def parse(text: str) -> list[Fault]:
    """Faults in their written form.

    Raises:
        ValueError: the text is not of that form.
    """
    return [_parse_one(part.strip()) for part in text.split(",") if part.strip()]


def _parse_one(text: str) -> Fault:
    kind, *pairs = (part.strip() for part in text.split(";"))
    members: dict[str, str] = {"kind": kind}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator:
            raise ValueError(f"{pair!r} in fault {text!r} is not key=value")
        members[name.strip()] = value.strip()
    try:
        return msgspec.convert(members, Fault, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"fault {text!r}: {error}") from error


@dataclass
class Standing:
    """A fault that applies to requests to come."""

    id: int
    fault: Fault
    applied: int = 0

    @property
    def used_up(self) -> bool:
        """True if it has been applied as often as asked for."""
        return self.fault.count is not None and self.applied >= self.fault.count


class FaultBook:
    """The standing faults of one engine.

    Args:
        seed: of the generator that decides about probabilities.
        faults: standing from the start.
    """

    def __init__(self, seed: int, faults: Iterable[Fault] = ()) -> None:
        self._random = random.Random(seed)
        self._standing: dict[int, Standing] = {}
        self._next_id = 1
        self.applied: dict[FaultKind, int] = dict.fromkeys(FaultKind, 0)
        """How often each kind has been applied."""
        for fault in faults:
            self.add(fault)

    def add(self, fault: Fault) -> Standing:
        """Let a fault apply to requests from now on."""
        standing = Standing(self._next_id, fault)
        self._standing[standing.id] = standing
        self._next_id += 1
        return standing

    def all(self) -> list[Standing]:
        """Standing faults, oldest first."""
        return list(self._standing.values())

    def remove(self, fault_id: int) -> bool:
        """Withdraw a fault; False if there is none of that id."""
        return self._standing.pop(fault_id, None) is not None

    def clear(self) -> None:
        """Withdraw all faults."""
        self._standing.clear()

    def draw(self, leg: Leg, asked: Sequence[Fault] = ()) -> list[Fault]:
        """The faults that one request meets.

        Args:
            leg: which leg the request is.
            asked: faults that the request itself brings.
        """
        met = [fault for fault in asked if fault.concerns(leg) and self._chance(fault)]
        for standing in self.all():
            if standing.fault.concerns(leg) and self._chance(standing.fault):
                standing.applied += 1
                met.append(standing.fault)
                if standing.used_up:
                    del self._standing[standing.id]
        for fault in met:
            self.applied[fault.kind] += 1
        return met

    def _chance(self, fault: Fault) -> bool:
        return fault.probability >= 1 or self._random.random() < fault.probability


def first(faults: Iterable[Fault], *kinds: FaultKind) -> Fault | None:
    """The first fault of one of these kinds."""
    return next((fault for fault in faults if fault.kind in kinds), None)
