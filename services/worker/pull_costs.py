"""What a prefill worker knows of its engine and of its links to decode engines.

It learns from every leg, gives the costs along with each handle (see
services/worker/pull_plan.py, which decides), and says loudly when a link is slower
than recomputing. While pulls are held back, one turn now and then gets a small
probe, so that a link that recovers is used again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import structlog

from services.worker.clock import Clock
from services.worker.event_messages import EngineRef, Hello
from services.worker.handoff import PrefillReport
from services.worker.link_estimates import LinkEstimator, PullSample
from services.worker.metrics import WorkerMetrics
from services.worker.prefill_speed import PrefillSpeed, SharedTime
from services.worker.pull_plan import Costs, Probe, PullCost, PullPlan, RecomputeCost, plan

_log = structlog.get_logger(__name__)

_MAX_LINKS = 256
"""Links remembered; engines that are long gone make room for new ones."""
_ASSUMED = PullCost(latency_seconds=0.01, seconds_per_token=0.0)
_ASSUMED_BYTES_PER_SECOND = 0.3e9
"""What UCX's fallback to TCP was seen to reach."""
_FIRST_CONTACT_SHARE = 0.5
_FIRST_CONTACT_SECONDS = 0.1
"""A first look at a link may lengthen its turn by this; it happens once or twice."""
_PROBE_SHARE = 0.08
"""A regular probe may lengthen its turn by this share of computing the prompt. A
probe that would take more waits for a longer prompt, or until it is overdue."""
_LEAST_SIZE = 1024
"""Tokens of the shortest pull by which a link is called slower than recomputing."""

_FAILED = ("PULL_FAILED", "ENGINE_EXPIRED")
HINT = (
    "pulls are held back. Likely causes: UCX fell back to TCP (set UCX_TLS to include cuda_ipc "
    "or your network's transport, and UCX_CUDA_IPC_ENABLE_GET_ZCOPY=y on one host); the peer's "
    "GPU is not visible to this process (name both in CUDA_VISIBLE_DEVICES; containers of one "
    "host must share IPC and PID namespaces); small KV blocks make "
    "many descriptors (use --block-size 128 or cross-layer blocks). "
    "`kvloop doctor` measures and says which"
)


@dataclass(frozen=True)
class GuardLimits:
    """When links are probed."""

    enabled: bool
    """Off: everything is pulled, however long it takes."""
    probe_tokens: int
    probe_turns: int
    """Turns without a pull after which a link is probed, ..."""
    probe_seconds: float
    """... or so much time."""
    probe_overdue_seconds: float
    """After that a probe may cost any time."""


@dataclass(frozen=True)
class Link:
    """What was measured of one decode engine."""

    engine: EngineRef
    samples: int
    tokens_per_second: float
    bytes_per_second: float
    """0 if the size of the KV is unknown."""
    latency_seconds: float
    held_back: bool


@dataclass
class _Link:
    measured_at: float
    """Last pull, or first sight."""
    estimator: LinkEstimator = field(default_factory=LinkEstimator)
    turns_without_pull: int = 0
    probing: bool = False
    """A turn has been offered a probe and has not ended."""
    held_back: bool = False


class PulledTurn:
    """One leg while it runs. Made by `PullCosts.leg`."""

    def __init__(self, engine: EngineRef | None, costs: Costs | None) -> None:
        self.engine = engine
        self.costs = costs
        """To go with the handle; None if there is none, or the guard is off."""
        self.report: PrefillReport | None = None
        """To be set when the engine has answered."""


class PullCosts:
    """Estimates of one prefill worker.

    Args:
        identity: the engine as its connector introduced itself.
        clock: the time.
        metrics: counts pulls held back.
        limits: when links are probed.
    """

    def __init__(
        self,
        identity: Callable[[], Hello | None],
        clock: Clock,
        metrics: WorkerMetrics,
        limits: GuardLimits,
    ) -> None:
        self._identity = identity
        self._clock = clock
        self._metrics = metrics
        self._limits = limits
        self._life: EngineRef | None = None
        self._time = SharedTime()
        self._speed = PrefillSpeed()
        self._links: OrderedDict[EngineRef, _Link] = OrderedDict()  # least recently used first

    @property
    def recompute(self) -> RecomputeCost | None:
        """The engine's speed; None until it was measured."""
        return self._speed.cost

    @contextmanager
    def leg(self, engine: EngineRef | None) -> Iterator[PulledTurn]:
        """Measure one leg while the block runs.

        Args:
            engine: decode engine that the leg's handle is of; None without a handle.
        """
        self._forget_other_lives()
        started = self._clock.monotonic()
        entry = self._time.enter(started)
        link = self._link(engine) if engine is not None else None
        costs = self._costs(link) if link is not None and self._limits.enabled else None
        offers_probe = link is not None and costs is not None and costs.probe.tokens > 0
        if link is not None and offers_probe:
            link.probing = True
        turn = PulledTurn(engine, costs)
        try:
            yield turn
        finally:
            now = self._clock.monotonic()
            shared, alone = self._time.leave(now, entry)
            if link is not None and offers_probe:
                link.probing = False
            if turn.report is not None:
                self._learn(turn.report, now - started, shared, alone)
                if turn.engine is not None and link is not None:
                    self._learn_link(turn.engine, link, turn.report, now - started, alone)

    def plan(self, engine: EngineRef, tokens: int) -> PullPlan:
        """What would become of a pull of so many tokens, all of them proven."""
        identity = self._identity()
        link = self._links.get(engine) or _Link(self._clock.monotonic())
        decided = plan(
            self._costs(link).to_params(),
            proven=tokens,
            cached=0,
            prompt=tokens,
            block_size=identity.block_size if identity is not None else 1,
        )
        if self._limits.enabled or not decided.held_back:
            return decided
        return PullPlan(
            tokens,
            decided.expected_pull_seconds,
            decided.expected_recompute_seconds,
            "the guard is switched off: all is pulled",
        )

    def links(self) -> list[Link]:
        """Every link that was measured, most recently used last."""
        per_token = self._bytes_per_token()
        return [
            Link(
                engine=engine,
                samples=link.estimator.samples,
                tokens_per_second=link.estimator.tokens_per_second,
                bytes_per_second=link.estimator.tokens_per_second * per_token,
                latency_seconds=cost.latency_seconds,
                held_back=link.held_back,
            )
            for engine, link in self._links.items()
            if (cost := link.estimator.cost) is not None
        ]

    def _forget_other_lives(self) -> None:
        """A restarted engine may compute and transfer at another speed."""
        identity = self._identity()
        life = identity.ref if identity is not None else None
        if life != self._life:
            self._life = life
            self._speed = PrefillSpeed()
            self._links.clear()
            self._metrics.links_held_back.set(0)

    def _link(self, engine: EngineRef) -> _Link:
        link = self._links.get(engine)
        if link is None:
            link = self._links[engine] = _Link(self._clock.monotonic())
            if len(self._links) > _MAX_LINKS:
                self._links.popitem(last=False)
        self._links.move_to_end(engine)
        return link

    def _costs(self, link: _Link) -> Costs:
        assumed = self._assumed()
        cost = self._trusted(link)
        return Costs(
            pull=cost,
            assumed_pull=assumed,
            recompute=self._speed.cost,
            probe=self._probe(link, first_contact=cost is None),
        )

    def _trusted(self, link: _Link) -> PullCost | None:
        """The estimate, unless it is unfavourable and rests on one pull: the first one
        from an engine also pays for the handshake, tens of milliseconds on CUDA."""
        cost, recompute = link.estimator.cost, self._speed.cost
        if cost is None or recompute is None or link.estimator.samples > 1:
            return cost
        favourable = cost.seconds(_LEAST_SIZE) <= recompute.seconds(0, _LEAST_SIZE)
        return cost if favourable else None

    def _probe(self, link: _Link, *, first_contact: bool) -> Probe:
        identity = self._identity()
        if link.probing or identity is None:
            return Probe()
        idle = self._clock.monotonic() - link.measured_at
        overdue = idle >= self._limits.probe_overdue_seconds
        due = (
            idle >= self._limits.probe_seconds
            or link.turns_without_pull >= self._limits.probe_turns
        )
        if not (first_contact or due or overdue):
            return Probe()
        least, whole = identity.kv_recompute_threshold, identity.hybrid_kv_cache
        # An engine that cannot cut a pull has no small probe to begin with.
        unlimited = overdue or (first_contact and whole)
        return Probe(
            tokens=max(self._limits.probe_tokens, least),
            min_tokens=least,
            share=_FIRST_CONTACT_SHARE if first_contact else _PROBE_SHARE,
            seconds=None if unlimited else _FIRST_CONTACT_SECONDS if first_contact else 0.0,
            whole=whole,
        )

    def _assumed(self) -> PullCost | None:
        per_token = self._bytes_per_token()
        if not per_token:
            return None
        return PullCost(_ASSUMED.latency_seconds, per_token / _ASSUMED_BYTES_PER_SECOND)

    def _bytes_per_token(self) -> float:
        identity = self._identity()
        if identity is None or identity.block_size <= 0:
            return 0.0
        return identity.kv_block_bytes / identity.block_size

    def _learn(self, report: PrefillReport, seconds: float, shared: float, alone: bool) -> None:
        start = report.cached_tokens + report.pulled_tokens
        if not report.pulled_tokens and report.miss_reason not in _FAILED:
            self._speed.add(start, report.recomputed_tokens, shared, alone=alone)
        elif report.pull_seconds is not None and alone:
            # Beside others it is unknown how much of the share was the pull's.
            self._speed.add(
                start, report.recomputed_tokens, seconds - report.pull_seconds, alone=True
            )

    def _learn_link(
        self,
        engine: EngineRef,
        link: _Link,
        report: PrefillReport,
        seconds: float,
        alone: bool,
    ) -> None:
        wanted = report.proven_tokens - report.cached_tokens
        recompute = self._speed.cost
        if report.pulled_tokens and report.pull_seconds is not None:
            link.estimator.add(
                PullSample(report.pulled_tokens, report.pull_seconds, contended=not alone)
            )
            self._count(report, recompute, wanted)
        elif report.miss_reason in _FAILED and wanted > 0:
            computed = recompute.seconds(0, report.prompt_tokens) if recompute else 0.0
            link.estimator.add_failure(
                PullSample(wanted, max(seconds - computed, 0.0), contended=not alone)
            )
        if report.pulled_tokens:
            link.measured_at = self._clock.monotonic()
            link.turns_without_pull = 0
        elif wanted > 0:
            link.turns_without_pull += 1
            if self._limits.enabled and report.miss_reason == "SLOWER_THAN_RECOMPUTE":
                self._metrics.pulls_held_back.labels(offered="none").inc()
        self._judge(engine, link, max(wanted, _LEAST_SIZE))

    def _count(self, report: PrefillReport, recompute: RecomputeCost | None, wanted: int) -> None:
        if self._limits.enabled and report.pulled_tokens < wanted:
            self._metrics.pulls_held_back.labels(offered="probe").inc()
        if recompute is not None and report.pull_seconds is not None:
            end = report.cached_tokens + report.pulled_tokens
            lost = report.pull_seconds - recompute.seconds(report.cached_tokens, end)
            self._metrics.pull_seconds_lost.inc(max(lost, 0.0))

    def _judge(self, engine: EngineRef, link: _Link, tokens: int) -> None:
        """Say so when a link has become slower than recomputing, or has recovered."""
        cost, recompute = self._trusted(link), self._speed.cost
        if cost is None or recompute is None:
            return
        pull, compute = cost.seconds(tokens), recompute.seconds(0, tokens)
        slower = pull > compute
        if slower == link.held_back:
            return
        link.held_back = slower
        self._metrics.links_held_back.set(sum(each.held_back for each in self._links.values()))
        figures = {
            "engine": engine.engine_id,
            "tokens": tokens,
            "pull_seconds": round(pull, 4),
            "recompute_seconds": round(compute, 4),
            "tokens_per_second": round(link.estimator.tokens_per_second),
            "bytes_per_second": round(link.estimator.tokens_per_second * self._bytes_per_token()),
        }
        if not slower:
            _log.warning("link_recovered", **figures)
        elif self._limits.enabled:
            _log.error("link_slower_than_recompute", hint=HINT, **figures)
        else:
            _log.error(
                "link_slower_than_recompute",
                hint="the guard is switched off: turns are slower than without reuse",
                **figures,
            )
