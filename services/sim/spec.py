"""What is fixed about one simulated engine, and about one life of it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from enum import StrEnum

from services.sim.blocks import FreedReads
from services.sim.latency import Profile


class KvRole(StrEnum):
    """vLLM's kv_role."""

    PRODUCER = "kv_producer"
    CONSUMER = "kv_consumer"
    BOTH = "kv_both"


class LoadFailurePolicy(StrEnum):
    """vLLM's kv_load_failure_policy."""

    RECOMPUTE = "recompute"
    FAIL = "fail"


@dataclass(frozen=True)
class EngineSpec:
    """How one engine is set up."""

    index: int
    """Place among the engines of its process."""
    kv_role: KvRole
    model: str
    """Served model name. Engines of one deployment compute the same KV because
    their names are equal."""
    host: str
    port: int
    side_channel_host: str
    side_channel_port: int
    max_model_len: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    answer_tokens: int
    profile: Profile
    time_scale: float
    """Simulated durations are multiplied by this. 0: nothing takes any time."""
    has_sidecar: bool
    """There is someone whom the connector tells of finished turns."""
    stock: bool
    """Behave as stock NixlConnector does, without proof and events."""
    bidirectional: bool
    kv_recompute_threshold: int
    decoder_kv_blocks_ttl_seconds: float
    pin_lease_seconds: float
    """kvloop_pin_lease: how long decode keeps blocks unless they are renewed."""
    kv_lease_seconds: float
    load_failure_policy: LoadFailurePolicy
    freed_reads: FreedReads
    vllm_version: tuple[int, ...]
    prompt_tokens_details: bool
    engine_id: str | None
    """Fixed engine id; None: every life has its own."""

    @property
    def params_in_streams(self) -> bool:
        """vLLM from 0.33 hands transfer params over in streams, too."""
        return self.vllm_version >= (0, 33)

    @property
    def renews_leases(self) -> bool:
        """vLLM from 0.22 keeps blocks alive on heartbeats."""
        return self.vllm_version >= (0, 22)

    @property
    def checks_deadlines(self) -> bool:
        """vLLM from 0.29 declines reads past the deadline that decode wrote into the
        handle; 0.25 does not."""
        return self.vllm_version >= (0, 29)

    @property
    def renews_pins(self) -> bool:
        """Where deadlines are checked, kvloop's connector keeps blocks by lease."""
        return self.checks_deadlines and not self.stock

    @property
    def retention_seconds(self) -> float:
        """How long decode keeps blocks that nobody renews."""
        ttl = self.decoder_kv_blocks_ttl_seconds
        return min(self.pin_lease_seconds, ttl) if self.renews_pins else ttl

    @property
    def version_text(self) -> str:
        """The version as vLLM writes it."""
        return ".".join(str(part) for part in self.vllm_version)


@dataclass(frozen=True)
class Identity:
    """One life of an engine."""

    engine_id: str
    epoch: str
    clock_offset: float
    """The engine's clock is the machine's plus this: no two engines agree on the
    time, as if each ran on its own host."""


def new_identity(spec: EngineSpec) -> Identity:
    """The identity of the engine's next life."""
    return Identity(
        engine_id=spec.engine_id or f"sim-{secrets.token_hex(8)}",
        epoch=secrets.token_hex(8),
        clock_offset=float(secrets.randbelow(1_000_000)),
    )
