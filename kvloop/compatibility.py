"""Which engines can exchange KV, from what they registered."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from kvloop.kvmeta.v1 import registry_pb2


class Obstacle(Enum):
    """Why two engines cannot exchange KV."""

    MODEL = "they serve different models"
    BLOCK_SIZE = "block sizes differ"
    KV_CACHE_DTYPE = "KV cache element types differ"
    KV_BUFFER_DEVICE = "KV buffer devices differ"
    CONTRACT_VERSION = "they speak different versions of the handle format"
    TENSOR_PARALLEL_SIZE = "tensor parallel sizes differ"
    PIPELINE_PARALLEL_SIZE = "pipeline parallel sizes differ"
    PREFILL_NOT_BIDIRECTIONAL = "bidirectional_kv_xfer is off on the prefill engine"
    DECODE_NOT_BIDIRECTIONAL = "bidirectional_kv_xfer is off on the decode engine"


def hand_over_obstacle(
    prefill: registry_pb2.Worker, decode: registry_pb2.Worker
) -> Obstacle | None:
    """Why the decode engine could not read what the prefill engine computed.

    Tensor parallel sizes may differ in this direction: vLLM maps the heads.
    """
    p, d = prefill.traits, decode.traits
    checks = (
        (Obstacle.MODEL, prefill.model == decode.model),
        (Obstacle.BLOCK_SIZE, p.block_size == d.block_size),
        (Obstacle.KV_CACHE_DTYPE, p.kv_cache_dtype == d.kv_cache_dtype),
        (Obstacle.KV_BUFFER_DEVICE, p.kv_buffer_device == d.kv_buffer_device),
    )
    return _first_failed(checks)


def pull_obstacle(prefill: registry_pb2.Worker, holder: registry_pb2.Worker) -> Obstacle | None:
    """Why the prefill engine could not pull retained KV back from a decode engine."""
    p, d = prefill.traits, holder.traits
    checks = (
        (Obstacle.CONTRACT_VERSION, p.contract_version == d.contract_version),
        (Obstacle.TENSOR_PARALLEL_SIZE, p.tensor_parallel_size == d.tensor_parallel_size),
        (Obstacle.PIPELINE_PARALLEL_SIZE, p.pipeline_parallel_size == d.pipeline_parallel_size),
        (Obstacle.PREFILL_NOT_BIDIRECTIONAL, p.bidirectional_kv_xfer),
        (Obstacle.DECODE_NOT_BIDIRECTIONAL, d.bidirectional_kv_xfer),
    )
    return hand_over_obstacle(prefill, holder) or _first_failed(checks)


def _first_failed(checks: Iterable[tuple[Obstacle, bool]]) -> Obstacle | None:
    return next((obstacle for obstacle, passed in checks if not passed), None)
