"""What kvmeta counts. Every way to miss or to lose has a name here."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterable
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter

from services.common.series import Series
from services.kvmeta.model import MissReason, PinStatus
from services.kvmeta.store import Swept


class CommitOutcome(StrEnum):
    """What became of a commit."""

    STORED = "stored"
    REPEATED = "repeated"
    SUPERSEDED = "superseded"
    ENDED = "ended"
    ENGINE_GONE = "engine_gone"
    TOO_MANY_CONVERSATIONS = "too_many_conversations"
    PARAMS_TOO_LARGE = "params_too_large"


class KvmetaMetrics:
    """Counters of one kvmeta process, on the registry given."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._takes = Series(
            Counter(
                "kvloop_kvmeta_takes",
                "TakeHandle calls: hit, or the reason of the miss.",
                ["outcome"],
                registry=registry,
            )
        )
        self._commits = Series(
            Counter(
                "kvloop_kvmeta_commits",
                "CommitTurn calls by outcome.",
                ["outcome"],
                registry=registry,
            )
        )
        self._returns = Counter(
            "kvloop_kvmeta_returns", "Handles given back.", ["held"], registry=registry
        )
        self._swept = Counter(
            "kvloop_kvmeta_swept_rows",
            "Conversations swept: expired unused, spent without a commit, forgotten.",
            ["outcome"],
            registry=registry,
        )
        self._pins = Counter(
            "kvloop_kvmeta_pins",
            "Pins that workers asked about, by what the ledger said. A worker asks for "
            "each once or twice per interval.",
            ["verdict"],
            registry=registry,
        )
        self._renewed = Counter(
            "kvloop_kvmeta_renewed_handles",
            "Handles whose deadline moved because their pin was renewed.",
            registry=registry,
        )
        self._evicted = Counter(
            "kvloop_kvmeta_evicted_handles",
            "Handles taken back to make room on their engine.",
            registry=registry,
        )
        self._voided = Counter(
            "kvloop_kvmeta_voided_handles",
            "Handles that became VOID because their engine was replaced, or because "
            "the ledger could not trust its past.",
            registry=registry,
        )
        self._leases_ended = Counter(
            "kvloop_kvmeta_leases_ended", "Leases that ran out.", registry=registry
        )

    def took(self, reason: MissReason | None) -> None:
        """Count a take: a hit if there is no reason."""
        self._takes.of("hit" if reason is None else reason.value.lower()).inc()

    def committed(self, outcome: CommitOutcome) -> None:
        """Count a commit."""
        self._commits.of(outcome.value).inc()

    def returned(self, *, held: bool) -> None:
        """Count a handle given back; `held`: by its holder."""
        self._returns.labels("true" if held else "false").inc()

    def swept(self, swept: Swept) -> None:
        """Count what one sweep did."""
        self._swept.labels("expired").inc(swept.expired)
        self._swept.labels("spent").inc(swept.spent)
        self._swept.labels("forgotten").inc(swept.forgotten)

    def pins_checked(self, statuses: Iterable[PinStatus]) -> None:
        """Count the answers for pins."""
        for verdict, count in Counts(status.verdict for status in statuses).items():
            self._pins.labels(verdict.value.lower()).inc(count)

    def renewed(self, handles: int) -> None:
        """Count handles whose deadline moved."""
        self._renewed.inc(handles)

    def evicted(self, handles: int) -> None:
        """Count handles taken back to make room."""
        self._evicted.inc(handles)

    def voided(self, handles: int) -> None:
        """Count handles that became VOID."""
        self._voided.inc(handles)

    def leases_ended(self, leases: int) -> None:
        """Count leases that ran out."""
        self._leases_ended.inc(leases)
