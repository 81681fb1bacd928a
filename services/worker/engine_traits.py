"""What a vLLM engine says of itself to its sidecar, seen from the connector.

Runs inside vLLM: imports only the standard library and what vLLM brings.
"""

from __future__ import annotations

import dataclasses
import secrets
from importlib import metadata
from typing import TYPE_CHECKING, Any

import vllm
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import metadata as nixl_metadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from services.worker.proof import CONTRACT_VERSION

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


PIN_LEASE = "kvloop_pin_lease"
"""Member of kv_connector_extra_config: seconds that a finished turn's blocks are kept
unless somebody renews."""
DEFAULT_PIN_LEASE_SECONDS = 60.0


def hello(
    scheduler: Any, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> dict[str, Any]:
    """First event of a connection: which engine this is and what it can do.

    The epoch is new for each process, so a restarted engine is recognised even
    if its engine id is configured.

    Args:
        scheduler: the scheduler half of NixlConnector.
        vllm_config: the engine's configuration.
        kv_cache_config: the engine's KV cache layout.
    """
    parallel = vllm_config.parallel_config
    transfer = vllm_config.kv_transfer_config
    return {
        "contract_version": CONTRACT_VERSION,
        "engine_id": str(scheduler.engine_id),
        "epoch": secrets.token_hex(8),
        "kv_role": transfer.kv_role,
        "vllm_version": vllm.__version__,
        "nixl_version": _nixl_version(),
        "block_size": scheduler.block_size,
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "data_parallel_size": parallel.data_parallel_size,
        "data_parallel_rank": parallel.data_parallel_rank,
        "kv_connector": transfer.kv_connector,
        "kv_buffer_device": transfer.kv_buffer_device,
        "side_channel_host": scheduler.side_channel_host,
        "side_channel_port": scheduler.side_channel_port,
        "max_model_len": vllm_config.model_config.max_model_len,
        "num_kv_blocks": kv_cache_config.num_blocks,
        "bidirectional_kv_xfer": bool(scheduler.is_bidirectional_kv_xfer_enabled),
        "decoder_kv_blocks_ttl": ttl_seconds(scheduler),
        "kv_recompute_threshold": scheduler.kv_recompute_threshold,
        "hybrid_kv_cache": is_hybrid(kv_cache_config),
        "lease_renewal": renews_leases(),
        "pin_lease_seconds": pin_lease_seconds(scheduler, vllm_config),
        "kv_cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "kv_block_bytes": kv_block_bytes(vllm_config, kv_cache_config),
    }


def renews_leases() -> bool:
    """True if a reader of retained blocks checks their deadline in this vLLM.

    Only then may it be short: without the check, a prefill engine that comes late
    would read blocks that belong to another request.
    """
    fields = dataclasses.fields(nixl_metadata.RemoteMeta)
    return any(field.name == "blocks_expiry_time" for field in fields)


def pin_lease_seconds(scheduler: Any, vllm_config: VllmConfig) -> float:
    """How long a finished turn's blocks are kept without a renewal; 0: there are none."""
    if not renews_leases():
        return 0.0
    lease = vllm_config.kv_transfer_config.get_from_extra_config(
        PIN_LEASE, DEFAULT_PIN_LEASE_SECONDS
    )
    return min(float(lease), ttl_seconds(scheduler))


def steps_in_flight(vllm_config: VllmConfig) -> int:
    """How many steps vLLM schedules at most before it has processed the first one's output.

    vLLM keeps one batch per pipeline stage in flight, and one more with asynchronous
    scheduling. Which versions overlap what differs; one more than the stages is
    never too few.
    """
    stages = int(vllm_config.parallel_config.pipeline_parallel_size)
    return max(stages + 1, int(getattr(vllm_config, "max_concurrent_batches", 0)))


def kv_block_bytes(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Memory that one KV block takes over all layers and ranks.

    A block belongs to one group of layers at a time, so the largest group counts.
    """
    parallel = vllm_config.parallel_config
    ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    per_rank = (
        group.kv_cache_spec.page_size_bytes * len(group.layer_names)
        for group in kv_cache_config.kv_cache_groups
    )
    return max(per_rank, default=0) * ranks


def ttl_seconds(scheduler: Any) -> float:
    """How long this engine keeps a finished turn's blocks."""
    ttl = getattr(scheduler, "decoder_kv_blocks_ttl", None)
    # 0.21 has one timeout for all blocks that wait to be read.
    return float(envs.VLLM_NIXL_ABORT_REQUEST_TIMEOUT if ttl is None else ttl)


def is_hybrid(kv_cache_config: KVCacheConfig) -> bool:
    """True if some layers keep less than the whole sequence."""
    groups = kv_cache_config.kv_cache_groups
    return len(groups) > 1 or any(
        not isinstance(group.kv_cache_spec, FullAttentionSpec) for group in groups
    )


def _nixl_version() -> str:
    for name in ("nixl", "nixl-cu13", "nixl-cu12"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"
