"""What a sidecar counts. Label values are listed beside each metric."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class WorkerMetrics:
    """Counters and gauges of one sidecar.

    Args:
        registry: where they are; one of their own if omitted.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self.legs_in_flight = Gauge(
            "kvloop_worker_legs_in_flight",
            "Legs that the sidecar is running.",
            registry=self.registry,
        )
        self.commits = Counter(
            "kvloop_worker_commits",
            "Decode legs by what became of the turn's handle. outcome: CommitOutcome.",
            ["outcome"],
            registry=self.registry,
        )
        self.commits_unsettled = Counter(
            "kvloop_worker_commits_unsettled",
            "Commits whose fate the ledger never told; their blocks fall at the engine's TTL.",
            registry=self.registry,
        )
        self.preparations = Counter(
            "kvloop_worker_preparations",
            "Legs whose body came before they could begin. outcome: PreparationOutcome.",
            ["outcome"],
            registry=self.registry,
        )
        self.handoffs_missing = Counter(
            "kvloop_worker_handoffs_missing",
            "Prefill legs whose reply carried nothing for decode to pull. reason: MissingHandoff.",
            ["api", "reason"],
            registry=self.registry,
        )
        self.reports_missing = Counter(
            "kvloop_worker_reports_missing",
            "Prefill replies without kvloop's report.",
            registry=self.registry,
        )
        self.handles_dropped = Counter(
            "kvloop_worker_handles_dropped",
            "Prefill legs repeated without the handle because the engine failed with it.",
            registry=self.registry,
        )
        self.orphan_turns = Counter(
            "kvloop_worker_orphan_turns",
            "Retained turns that were released because no leg wanted them. "
            "cause: abandoned (its leg ended without a commit), unknown (no leg waited).",
            ["cause"],
            registry=self.registry,
        )
        self.releases = Counter(
            "kvloop_worker_releases",
            "Retained turns whose blocks the engine was told to free. cause: ReleaseCause.",
            ["cause"],
            registry=self.registry,
        )
        self.event_lines_unreadable = Counter(
            "kvloop_worker_event_lines_unreadable",
            "Lines from the engine's connector that could not be understood.",
            registry=self.registry,
        )
        self._add_retention()
        self._add_pulls()

    def _add_pulls(self) -> None:
        """What the guard against slow pulls does on a prefill engine."""
        self.pulls_held_back = Counter(
            "kvloop_worker_pulls_held_back",
            "Prefill legs that pulled less than was proven, because computing is faster. "
            "offered: none, probe.",
            ["offered"],
            registry=self.registry,
        )
        self.pull_seconds_lost = Counter(
            "kvloop_worker_pull_seconds_lost",
            "Seconds by which pulls, probes included, took longer than computing the same "
            "tokens would have.",
            registry=self.registry,
        )
        self.links_held_back = Gauge(
            "kvloop_worker_links_held_back",
            "Links to decode engines that are slower than recomputing. 0 in good order.",
            registry=self.registry,
        )

    def _add_retention(self) -> None:
        """What a decode engine retains, and for whom."""
        self.retained_pins = Gauge(
            "kvloop_worker_retained_pins",
            "Finished turns whose KV the engine retains.",
            registry=self.registry,
        )
        self.retained_blocks = Gauge(
            "kvloop_worker_retained_blocks",
            "KV blocks that they occupy.",
            registry=self.registry,
        )
        self.retained_block_seconds = Counter(
            "kvloop_worker_retained_block_seconds",
            "KV blocks retained, times how long. Brought up to date when pins change, and with "
            "each round of renewals.",
            registry=self.registry,
        )
        self.orphan_pins = Gauge(
            "kvloop_worker_orphan_pins",
            "Retained turns that no ledger row owns. 0 at rest.",
            registry=self.registry,
        )
        self.orphans_found = Counter(
            "kvloop_worker_orphan_pins_found",
            "Retained turns that were found to have no ledger row; they fall at their lease.",
            registry=self.registry,
        )
        self.renewals = Counter(
            "kvloop_worker_pin_renewals",
            "Renewals that the engine has confirmed.",
            registry=self.registry,
        )
        self.audits_failed = Counter(
            "kvloop_worker_pin_audits_failed",
            "Times that the ledger could not be asked which pins are wanted. reason: of the error.",
            ["reason"],
            registry=self.registry,
        )
        self.evictions = Counter(
            "kvloop_worker_evictions",
            "Retained turns freed to make room, or given up. reason: Shortage, overdue.",
            ["reason"],
            registry=self.registry,
        )
