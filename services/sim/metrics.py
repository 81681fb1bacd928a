"""The engine's counters as Prometheus text, under vLLM's names."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from services.sim.core import EngineCore
from services.sim.stats import Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LABELS = ("model_name", "engine")


class EngineCollector(Collector):
    """Reads one engine's counters when Prometheus asks.

    Args:
        core: the engine.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._labels = (core.spec.model, "0")

    def collect(self) -> Iterator[Metric]:
        """All metrics."""
        core, stats = self._core, self._core.stats
        core.pins.expire(core.now())
        scheduler = core.scheduler
        yield self._gauge(
            "num_requests_running",
            "Number of requests in model execution batches.",
            len(scheduler.running),
        )
        yield self._gauge(
            "num_requests_waiting",
            "Number of requests waiting to be processed.",
            scheduler.num_waiting,
        )
        yield self._gauge(
            "kv_cache_usage_perc",
            "KV-cache usage. 1 means 100 percent usage.",
            core.pool.usage,
        )
        for name, documentation, value in (
            (
                "prefix_cache_queries",
                "Prefix cache queries, in terms of number of queried tokens.",
                stats.prefix_cache_queries,
            ),
            (
                "prefix_cache_hits",
                "Prefix cache hits, in terms of number of cached tokens.",
                stats.prefix_cache_hits,
            ),
            (
                "external_prefix_cache_queries",
                "External prefix cache queries from KV connector, in tokens.",
                stats.external_prefix_cache_queries,
            ),
            (
                "external_prefix_cache_hits",
                "External prefix cache hits from KV connector, in tokens.",
                stats.external_prefix_cache_hits,
            ),
            (
                "num_preemptions",
                "Cumulative number of preemption from the engine.",
                stats.num_preemptions,
            ),
            ("prompt_tokens", "Number of prefill tokens processed.", stats.prompt_tokens),
            (
                "prompt_tokens_cached",
                "Number of cached prompt tokens (local + external).",
                stats.prompt_tokens_cached,
            ),
            (
                "generation_tokens",
                "Number of generation tokens processed.",
                stats.generation_tokens,
            ),
            (
                "nixl_num_failed_transfers",
                "Number of failed NIXL KV Cache transfers, handshakes and notifications.",
                stats.nixl_num_failed_transfers
                + stats.nixl_num_failed_handshakes
                + stats.nixl_num_failed_notifications,
            ),
            (
                "nixl_num_failed_notifications",
                "Number of failed NIXL KV Cache notifications.",
                stats.nixl_num_failed_notifications,
            ),
            (
                "nixl_num_kv_expired_reqs",
                "Number of requests that had their KV expire.",
                core.pins.expired + stats.nixl_num_declined_reads,
            ),
            (
                "nixl_num_notifications_after_expiry",
                "Number of completion notifications for requests that were no longer tracked.",
                core.pins.unknown_notifications,
            ),
        ):
            yield self._counter(name, documentation, value)
        yield self._successes()
        for name, documentation, histogram in (
            (
                "time_to_first_token_seconds",
                "Histogram of time to first token in seconds.",
                stats.time_to_first_token_seconds,
            ),
            (
                "inter_token_latency_seconds",
                "Histogram of inter-token latency in seconds.",
                stats.inter_token_latency_seconds,
            ),
            (
                "e2e_request_latency_seconds",
                "Histogram of e2e request latency in seconds.",
                stats.e2e_request_latency_seconds,
            ),
            (
                "request_prompt_tokens",
                "Number of prefill tokens processed.",
                stats.request_prompt_tokens,
            ),
            (
                "request_generation_tokens",
                "Number of generation tokens processed.",
                stats.request_generation_tokens,
            ),
            (
                "nixl_xfer_time_seconds",
                "Histogram of transfer duration for NIXL KV Cache transfers.",
                stats.nixl_xfer_time_seconds,
            ),
            (
                "nixl_bytes_transferred",
                "Histogram of bytes transferred per NIXL KV Cache transfers.",
                stats.nixl_bytes_transferred,
            ),
            (
                "nixl_num_descriptors",
                "Histogram of number of descriptors per NIXL KV Cache transfers.",
                stats.nixl_num_descriptors,
            ),
        ):
            yield self._histogram(name, documentation, histogram)

    def _gauge(self, name: str, documentation: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", documentation, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, documentation: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", documentation, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _successes(self) -> Metric:
        family = CounterMetricFamily(
            "vllm:request_success",
            "Count of successfully processed requests.",
            labels=(*_LABELS, "finished_reason"),
        )
        for reason, count in self._core.stats.request_success.items():
            family.add_metric((*self._labels, reason), count)
        return family

    def _histogram(self, name: str, documentation: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(f"vllm:{name}", documentation, labels=_LABELS)
        bounds = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
        counts = accumulate(histogram.counts)
        buckets = [(bound, float(count)) for bound, count in zip(bounds, counts, strict=True)]
        family.add_metric(self._labels, buckets, histogram.sum)
        return family


def render(core: EngineCore) -> bytes:
    """All metrics of an engine in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(core))
    return generate_latest(registry)
