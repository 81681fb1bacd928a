"""Writes the tables of docs/metrics.md from the registries of the services.

python -m tests.unit.docs.metrics_document
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

import grpc
from prometheus_client import CollectorRegistry, Metric, ProcessCollector
from prometheus_client.registry import Collector

from kvloop.common.v1 import common_pb2
from kvloop.kvmeta.v1 import ledger_pb2, registry_pb2
from kvloop.router.v1 import router_pb2
from kvloop.worker.v1 import worker_pb2
from services.common.loop_metrics import watch_tasks
from services.common.rpc_metrics import RpcMetrics
from services.kvmeta import model as kvmeta_model
from services.kvmeta.metrics import CommitOutcome as LedgerCommitOutcome
from services.kvmeta.metrics import KvmetaMetrics
from services.router.breaker import BreakerState
from services.router.metrics import Fallback, HandleReturn, Outcome, RouterMetrics
from services.router.moves import Move
from services.router.preparation import Prepared
from services.worker.budget import Shortage
from services.worker.commits import CommitOutcome
from services.worker.engine import Api
from services.worker.handoff import MissingHandoff
from services.worker.metrics import WorkerMetrics
from services.worker.pins import ReleaseCause
from services.worker.prepared_request import PreparationOutcome
from tests.unit.docs.generated_part import DOCS, with_part

PAGE = DOCS / "metrics.md"
_ERROR_REASON = "the reason of an error of kvloop, written out where it is raised"


def _words(kind: type[Enum], *more: str) -> str:
    return _listed([*(str(member.value) for member in kind), *more])


def _listed(values: Iterable[str]) -> str:
    return ", ".join(f"`{value}`" for value in values)


def _methods() -> str:
    names = {
        method.name
        for file in (router_pb2, ledger_pb2, registry_pb2, worker_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    return _listed(sorted(names)) + " and those of gRPC's health and reflection services"


def _miss_reasons() -> str:
    names = [name.removeprefix("MISS_REASON_").lower() for name in common_pb2.MissReason.keys()]
    return _listed(name for name in names if name != "unspecified")


LABEL_VALUES = {
    ("kvloop_rpc_seconds", "method"): _methods(),
    ("kvloop_rpc_seconds", "code"): _listed(code.name for code in grpc.StatusCode),
    ("kvloop_router_turns", "outcome"): _words(Outcome),
    ("kvloop_router_misses", "reason"): _miss_reasons(),
    ("kvloop_router_fallbacks", "cause"): _words(Fallback),
    ("kvloop_router_turns_moved", "reason"): _words(Move),
    ("kvloop_router_handle_returns", "outcome"): _words(HandleReturn),
    ("kvloop_router_bodies_ahead", "leg"): _listed(["prefill", "decode"]),
    ("kvloop_router_bodies_ahead", "outcome"): _words(Prepared),
    ("kvloop_router_prompt_tokens", "source"): _listed(["pulled", "cached", "recomputed"]),
    ("kvloop_router_breakers", "state"): _words(BreakerState),
    ("kvloop_router_errors", "reason"): _ERROR_REASON + ", in lower case as in `worker_lost`",
    ("kvloop_kvmeta_takes", "outcome"): _listed(
        ["hit", *(reason.value.lower() for reason in kvmeta_model.MissReason)]
    ),
    ("kvloop_kvmeta_commits", "outcome"): _words(LedgerCommitOutcome),
    ("kvloop_kvmeta_returns", "held"): _listed(["true", "false"]),
    ("kvloop_kvmeta_swept_rows", "outcome"): _listed(["expired", "spent", "forgotten"]),
    ("kvloop_kvmeta_pins", "verdict"): _listed(
        verdict.value.lower() for verdict in kvmeta_model.PinVerdict
    ),
    ("kvloop_worker_commits", "outcome"): _words(CommitOutcome),
    ("kvloop_worker_preparations", "outcome"): _words(PreparationOutcome),
    ("kvloop_worker_handoffs_missing", "api"): _words(Api),
    ("kvloop_worker_handoffs_missing", "reason"): _words(MissingHandoff),
    ("kvloop_worker_orphan_turns", "cause"): _listed(
        [ReleaseCause.ABANDONED.value, ReleaseCause.UNKNOWN.value]
    ),
    ("kvloop_worker_releases", "cause"): _words(ReleaseCause),
    ("kvloop_worker_pulls_held_back", "offered"): _listed(["none", "probe"]),
    ("kvloop_worker_pin_audits_failed", "reason"): _ERROR_REASON + ", as in `LEDGER_UNREACHABLE`",
    ("kvloop_worker_evictions", "reason"): _words(Shortage, "overdue"),
}
"""What each label may be, by metric family."""

_UNITS = (
    ("block_seconds", "block-seconds"),
    ("seconds", "seconds"),
    ("tokens", "tokens"),
    ("blocks", "KV blocks"),
    ("bytes", "bytes"),
)


@dataclass(frozen=True)
class Family:
    """One metric of a service."""

    family: Metric
    labels: tuple[str, ...]

    @property
    def exposed(self) -> str:
        """Name as Prometheus stores it; of a histogram, without _bucket and the like."""
        return f"{self.family.name}_total" if self.family.type == "counter" else self.family.name

    @property
    def samples(self) -> list[str]:
        """Every name under which Prometheus stores the family's samples."""
        if self.family.type == "histogram":
            return [f"{self.family.name}_{part}" for part in ("bucket", "count", "sum")]
        return [self.exposed]

    @property
    def unit(self) -> str:
        """What one of it is."""
        return next((unit for part, unit in _UNITS if part in self.family.name), "count")


class _Recorder(CollectorRegistry):
    """Remembers its collectors, of which a registry shows only what they collect."""

    def __init__(self) -> None:
        super().__init__()
        self.collectors: list[Collector] = []

    def register(self, collector: Collector) -> None:
        super().register(collector)
        self.collectors.append(collector)


def _families(registry: _Recorder) -> list[Family]:
    return [
        Family(family, tuple(getattr(collector, "_labelnames", ())))
        for collector in registry.collectors
        for family in collector.collect()
    ]


def services() -> dict[str, list[Family]]:
    """The metrics of each service, and under `every service` those that all have."""
    shared, router, kvmeta, worker = (_Recorder() for _ in range(4))
    RpcMetrics(shared)
    ProcessCollector(registry=shared)
    watch_tasks(shared, lambda: 0)
    RouterMetrics(router)
    KvmetaMetrics(kvmeta)
    WorkerMetrics(worker)
    return {
        "every service": _families(shared),
        "router": _families(router),
        "kvmeta": _families(kvmeta),
        "worker": _families(worker),
    }


def tables() -> str:
    """The generated part of the page."""
    return "\n".join(
        line for service, families in services().items() for line in _section(service, families)
    )


def _section(service: str, families: list[Family]) -> Iterator[str]:
    yield f"## {service[0].upper()}{service[1:]}\n"
    yield "| metric | type | unit | labels | |"
    yield "|---|---|---|---|---|"
    for each in families:
        labels = ", ".join(f"`{label}`" for label in each.labels)
        text = each.family.documentation.replace("|", "\\|")
        yield f"| `{each.exposed}` | {each.family.type} | {each.unit} | {labels} | {text} |"
    yield ""
    for each in families:
        for label in each.labels:
            values = LABEL_VALUES[each.family.name, label]
            yield f"- `{each.exposed}`, `{label}`: {values}."
    yield ""


def with_tables(page: str) -> str:
    """The page with its generated part made anew."""
    return with_part(page, "metrics_document", tables())


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
