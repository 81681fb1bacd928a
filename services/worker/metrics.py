"""What a sidecar counts. Label values are listed beside each metric."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class WorkerMetrics:
    """Counters and gauges of one sidecar, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
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
            "Engine requests whose retained blocks the engine was told to free.",
            registry=self.registry,
        )
        self.event_lines_unreadable = Counter(
            "kvloop_worker_event_lines_unreadable",
            "Lines from the engine's connector that could not be understood.",
            registry=self.registry,
        )
