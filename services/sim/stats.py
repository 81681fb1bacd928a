"""What an engine counts, in plain numbers; rendered only when someone asks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
LONG_SECONDS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0)
TTFT_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)
BYTES = tuple(float(2 ** (10 + power)) for power in range(1, 25, 2))
DESCRIPTORS = (10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10_000, 20_000, 50_000)


class Histogram:
    """Counts by upper bounds, as Prometheus has them."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


@dataclass
class EngineStats:
    """Counters of one life of an engine, named as vLLM's metrics without prefix."""

    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    external_prefix_cache_queries: int = 0
    external_prefix_cache_hits: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    generation_tokens: int = 0
    request_success: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("stop", "length", "abort", "error"), 0)
    )
    nixl_num_failed_transfers: int = 0
    nixl_num_failed_handshakes: int = 0
    nixl_num_failed_notifications: int = 0
    nixl_num_declined_reads: int = 0
    """Reads declined because the other engine's deadline had come."""
    time_to_first_token_seconds: Histogram = field(default_factory=lambda: Histogram(TTFT_SECONDS))
    inter_token_latency_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    e2e_request_latency_seconds: Histogram = field(default_factory=lambda: Histogram(LONG_SECONDS))
    request_prompt_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    request_generation_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    nixl_xfer_time_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    nixl_bytes_transferred: Histogram = field(default_factory=lambda: Histogram(BYTES))
    nixl_num_descriptors: Histogram = field(default_factory=lambda: Histogram(DESCRIPTORS))
