"""What a vLLM engine says of itself to its sidecar, seen from the connector.

Runs inside vLLM: imports only the standard library and what vLLM brings.
"""

from __future__ import annotations

import secrets
from importlib import metadata
from typing import TYPE_CHECKING, Any

import vllm
from vllm import envs
from vllm.v1.kv_cache_interface import FullAttentionSpec

from services.worker.proof import CONTRACT_VERSION

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


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
        "lease_renewal": hasattr(scheduler, "_stop_heartbeat"),
        "kv_cache_dtype": str(vllm_config.cache_config.cache_dtype),
    }


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
