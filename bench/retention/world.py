"""One decode engine, its sidecar and the ledger over hours of virtual time.

The decisions are the real ones: the ledger's rules (services/kvmeta/rules.py and
pin_rules.py), the sidecar's pin table, its estimate of pauses, its budget. Only time
and the engine are simulated: blocks are freed the moment that somebody says so.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from bench.retention.arms import Arm
from bench.retention.workload import End, Script
from services.kvmeta import pin_rules, rules
from services.kvmeta.deadlines import Policy
from services.kvmeta.model import (
    Commit,
    Conversation,
    ConversationKey,
    EngineRef,
    HandleState,
    HeldPin,
    PinVerdict,
)
from services.worker.budget import BlockShares, BlockUse, Candidate, blocks_to_free, choose
from services.worker.event_messages import EngineRef as SidecarEngineRef
from services.worker.event_messages import RenewedPin
from services.worker.gaps import Outlook, PauseHistory
from services.worker.horizon import horizon_seconds, kept_anyway
from services.worker.metrics import WorkerMetrics
from services.worker.pin_renewal import lease_seconds
from services.worker.pins import Pin, PinTable, ReleaseCause, Standing

TTL_SECONDS = 480.0
LEASE_SECONDS = 60.0
BLOCK_SIZE = 16
READ_SECONDS = 0.2
"""From the start of a turn until prefill has read what decode retains."""
ROOM_SECONDS = 2.0
"""How often the sidecar looks whether room must be made."""
_US = 1_000_000
_LIFE = ("decode", "life")
_ENGINE = EngineRef(*_LIFE)
_POLICY = Policy(
    handle_margin_us=5 * _US,
    handle_ttl_us=None,
    max_retention_us=3600 * _US,
    dead_retention_us=7200 * _US,
    release_retention_us=600 * _US,
    max_conversations=10**9,
)


@dataclass
class Outcome:
    """What one run came to."""

    block_seconds: float = 0.0
    turns: int = 0
    """Turns that could have reused something: all but first ones."""
    hits: int = 0
    peak_blocks: int = 0
    freed: dict[str, float] = field(default_factory=dict)
    """Block-seconds by how the pins went: read, expired, or the cause of a release."""

    @property
    def hit_rate(self) -> float:
        """Share of the turns that found their KV."""
        return self.hits / self.turns if self.turns else 0.0


@dataclass
class _Talk:
    """One conversation while it runs."""

    script: Script
    row: Conversation | None = None
    pin: Pin | None = None


class World:
    """Runs scripts under one arm.

    Args:
        arm: how KV is retained.
        num_blocks: KV blocks of the decode engine.
    """

    def __init__(self, arm: Arm, num_blocks: int) -> None:
        self._arm = arm
        self._num_blocks = num_blocks
        self._now = 0.0
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._pins = PinTable(PauseHistory(), WorkerMetrics())
        self._owners: dict[str, _Talk] = {}
        self._talking = 0
        self._horizons: dict[str, float] = {}
        self.outcome = Outcome()

    def run(self, scripts: Iterable[Script]) -> Outcome:
        """Play the scripts to their end, and on until nothing is retained."""
        self._pins.connected(SidecarEngineRef(*_LIFE), 0.0)
        for script in scripts:
            self._talking += 1
            self._at(script.start, self._starter(_Talk(script), 0))
        if self._arm.leases:
            self._at(LEASE_SECONDS / 3, self._audit)
            self._at(ROOM_SECONDS, self._make_room)
        while self._events:
            self._now, _, event = heapq.heappop(self._events)
            event()
        return self.outcome

    # ---- turns ---------------------------------------------------------------

    def _starter(self, talk: _Talk, number: int) -> Callable[[], None]:
        return lambda: self._start_turn(talk, number)

    def _start_turn(self, talk: _Talk, number: int) -> None:
        hit = self._take(talk, number)
        if number:
            self.outcome.turns += 1
            self.outcome.hits += hit
        if hit and talk.pin is not None:
            pin = talk.pin
            self._pins.judge(pin, Standing.IN_USE)
            self._at(self._now + READ_SECONDS, lambda: self._free(pin, "read"))
        turn = talk.script.turns[number]
        self._at(self._now + turn.seconds, lambda: self._end_turn(talk, number))

    def _take(self, talk: _Talk, number: int) -> bool:
        """Whether the turn gets its conversation's handle."""
        if not self._arm.leases:
            return number > 0 and talk.pin is not None and self._holds(talk.pin)
        row, now_us = talk.row, self._now_us()
        if row is None:
            return False
        if rules.may_take(row, _turn_id(talk, number), now_us, engine_alive=True):
            talk.row = rules.taken(row, _turn_id(talk, number), now_us)
            assert talk.pin is not None
            assert self._holds(talk.pin), "the ledger promised what the engine has not"
            return True
        talk.row = rules.turn_opened(row, now_us, _POLICY)
        return False

    def _end_turn(self, talk: _Talk, number: int) -> None:
        turn = talk.script.turns[number]
        lease = LEASE_SECONDS if self._arm.leases else TTL_SECONDS
        old = talk.pin
        pin = talk.pin = Pin(
            request_id=_turn_id(talk, number),
            turn_id=_turn_id(talk, number),
            num_tokens=turn.num_tokens,
            num_blocks=-(-turn.num_tokens // BLOCK_SIZE),
            ended_at=self._now,
            deadline=self._now + lease,
            tenant=talk.script.tenant,
        )
        if self._arm.leases:
            self._commit(talk, number, pin, old)
        self._owners[pin.turn_id] = talk
        self._pins.add(pin, self._now)
        self.outcome.peak_blocks = max(self.outcome.peak_blocks, self._pins.retained_blocks)
        self._at(pin.deadline, lambda: self._fall(pin))
        if number + 1 < len(talk.script.turns):
            gap = talk.script.turns[number + 1].gap_seconds
            self._at(self._now + gap, self._starter(talk, number + 1))
        else:
            self._end_conversation(talk)

    def _commit(self, talk: _Talk, number: int, pin: Pin, old: Pin | None) -> None:
        verdict = rules.commit(
            talk.row,
            Commit(
                key=ConversationKey(talk.script.tenant, "model", talk.script.name),
                request_id=pin.turn_id,
                turn=number + 1 if talk.row is None else talk.row.issued_turn,
                worker_id="decode",
                engine=_ENGINE,
                params=b"{}",
                engine_ttl_us=round(LEASE_SECONDS * _US),
                num_tokens=pin.num_tokens,
                num_blocks=pin.num_blocks,
                retention_ttl_us=round(TTL_SECONDS * _US),
            ),
            pin.turn_id,
            self._now_us(),
            _POLICY,
            engine_alive=True,
        )
        assert isinstance(verdict, rules.Stored)
        talk.row = verdict.row
        self._pins.judge(pin, Standing.WANTED)
        pin.wanted_until = self._now + TTL_SECONDS
        if verdict.release_old and old is not None and self._arm.releases:
            self._free(old, ReleaseCause.SUPERSEDED)

    def _end_conversation(self, talk: _Talk) -> None:
        self._talking -= 1
        if talk.script.end is not End.SAID or not self._arm.leases or talk.row is None:
            return
        talk.row = rules.ended(talk.row, self._now_us(), _POLICY)
        if talk.pin is not None and self._arm.releases:
            self._free(talk.pin, ReleaseCause.ENDED)

    # ---- what the sidecar does -----------------------------------------------

    def _audit(self) -> None:
        """Every third of a lease: ask the ledger, then renew or release."""
        now_us = self._now_us()
        for pin in list(self._pins):
            talk = self._owners[pin.turn_id]
            row = talk.row if talk.row and talk.row.commit_request_id == pin.turn_id else None
            status = self._checked(talk, row, pin, now_us)
            if status is PinVerdict.RELEASE:
                self._free(pin, ReleaseCause.EXPIRED)
        if self._pins_or_talk():
            self._at(self._now + LEASE_SECONDS / 3, self._audit)

    def _checked(self, talk: _Talk, row: Conversation | None, pin: Pin, now_us: int) -> PinVerdict:
        answer = pin_rules.checked(row, self._held(pin), now_us, _POLICY)
        talk.row = answer.change or talk.row
        if answer.status.verdict is not PinVerdict.WANTED or row is None:
            return answer.status.verdict
        wanted = answer.status.wanted_for_us / _US
        self._pins.judge(pin, Standing.WANTED, wanted_until=self._now + wanted)
        lease = lease_seconds(pin, wanted, pin_lease_seconds=LEASE_SECONDS, now=self._now)
        if lease is not None:
            moved = self._now + lease - pin.deadline
            renewed = RenewedPin(pin.request_id, lease, pin.extension_seconds + moved)
            self._pins.renewed([renewed], self._now)
            confirmed = pin_rules.checked(talk.row, self._held(pin), now_us, _POLICY)
            talk.row = confirmed.change or talk.row
            self._at(pin.deadline, lambda: self._fall(pin))
        return PinVerdict.WANTED

    def _held(self, pin: Pin) -> HeldPin:
        return HeldPin(
            pin.turn_id,
            round((pin.deadline - self._now) * _US),
            round(pin.extension_seconds * _US),
        )

    def _make_room(self) -> None:
        """Free what goes beyond the budget, and what nobody is likely to come back for."""
        outlooks: dict[str, Outlook] = {}
        self._horizons.clear()
        candidates = [
            self._candidate(pin, outlooks)
            for pin in self._pins
            if pin.standing is Standing.WANTED and not pin.releasing
        ]
        chosen = [each for each in candidates if self._is_late(each, outlooks)]
        self._evict(chosen, "overdue")
        if self._arm.retained_share is not None:
            shares = BlockShares(self._arm.retained_share, 0.0)
            use = BlockUse(self._num_blocks, self._pins.retained_blocks)
            lacking = blocks_to_free(use, shares)
            if lacking is not None:
                left = [each for each in candidates if each not in chosen]
                self._evict(choose(left, lacking[0], "value"), ReleaseCause.BUDGET)
        if self._pins_or_talk():
            self._at(self._now + ROOM_SECONDS, self._make_room)

    def _candidate(self, pin: Pin, outlooks: dict[str, Outlook]) -> Candidate:
        if pin.tenant not in outlooks:
            outlooks[pin.tenant] = self._pins.pauses.outlook(pin.tenant)
        silent = self._now - pin.ended_at
        until = pin.deadline if pin.wanted_until is None else pin.wanted_until
        chance = outlooks[pin.tenant].chance(silent, until - self._now)
        return Candidate(pin.turn_id, pin.num_blocks, pin.num_tokens, silent, chance)

    def _is_late(self, candidate: Candidate, outlooks: dict[str, Outlook]) -> bool:
        """Whether the conversation has been silent beyond its tenant's horizon."""
        if not self._arm.lost_share or kept_anyway(candidate.turn_id):
            return False
        tenant = self._owners[candidate.turn_id].script.tenant
        if tenant not in self._horizons:
            self._horizons[tenant] = horizon_seconds(
                outlooks[tenant], ttl_seconds=TTL_SECONDS, lost_share=self._arm.lost_share
            )
        return candidate.silent_seconds > self._horizons[tenant]

    def _evict(self, chosen: Iterable[Candidate], cause: str) -> None:
        for candidate in chosen:
            talk = self._owners[candidate.turn_id]
            if talk.row is None or talk.pin is None or not pin_rules.may_evict(talk.row):
                continue
            talk.row = pin_rules.evicted(talk.row, self._now_us(), _POLICY)
            self._free(talk.pin, cause)

    # ---- what the engine does ------------------------------------------------

    def _fall(self, pin: Pin) -> None:
        """The engine drops a pin whose deadline has come and was not moved."""
        if self._now >= pin.deadline - 1e-9:
            self._free(pin, ReleaseCause.EXPIRED)

    def _free(self, pin: Pin, cause: str) -> None:
        if not self._holds(pin):
            return
        if cause != "read":
            self._pins.release([pin.request_id], ReleaseCause.OTHER)
        self._pins.freed([pin.request_id], self._now)
        spent = pin.num_blocks * (self._now - pin.ended_at)
        self.outcome.block_seconds += spent
        self.outcome.freed[cause] = self.outcome.freed.get(cause, 0.0) + spent
        row = self._owners[pin.turn_id].row
        if row is not None and row.commit_request_id == pin.turn_id:
            self._settle(self._owners.pop(pin.turn_id), row, cause)

    def _settle(self, talk: _Talk, row: Conversation, cause: str) -> None:
        """What the ledger's sweeper makes of a row whose blocks are gone."""
        expired = cause == ReleaseCause.EXPIRED and row.state is HandleState.AVAILABLE
        if expired:
            talk.row = rules.swept(row, self._now_us(), _POLICY)

    def _holds(self, pin: Pin) -> bool:
        return self._pins.of_turn(pin.turn_id) is pin

    def _pins_or_talk(self) -> bool:
        return len(self._pins) > 0 or self._talking > 0

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def _now_us(self) -> int:
        return round(self._now * _US)


def _turn_id(talk: _Talk, number: int) -> str:
    return f"{talk.script.name}-{number}"
