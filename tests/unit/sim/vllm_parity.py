"""What the installed vLLM and kvloop's real connector make of cases given as JSON.

Run in a process of its own, as importing vLLM takes long. Reads one JSON object
from standard input and writes one to standard output:

    finished  requests that end -> (blocks are kept, transfer params)
    prefills  requests that bring a handle -> what is pulled, and the reply's params
    replies   replies and chunks -> the same, parsed and written by vLLM's own models
"""

from __future__ import annotations

import json
import os
import sys
import types
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionResponse,
    ChatCompletionStreamResponse,
)
from vllm.entrypoints.openai.completion.protocol import (
    CompletionResponse,
    CompletionStreamResponse,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import RequestStatus

from services.worker.connector import KvloopConnector

_STATUSES = {
    "stop": RequestStatus.FINISHED_STOPPED,
    "length": RequestStatus.FINISHED_LENGTH_CAPPED,
    "abort": RequestStatus.FINISHED_ABORTED,
    "error": RequestStatus.FINISHED_ERROR,
}
_MODELS = {
    "chat.completion": ChatCompletionResponse,
    "chat.completion.chunk": ChatCompletionStreamResponse,
    "text_completion": CompletionResponse,
    "text_completion.chunk": CompletionStreamResponse,
}


def main() -> None:
    """Answer the cases."""
    cases = json.load(sys.stdin)
    results = {
        "finished": [_finish(cases["engine"], case) for case in cases["finished"]],
        "prefills": [_prefill(cases["engine"], case) for case in cases["prefills"]],
        "replies": [_rewrite(kind, reply) for kind, reply in cases["replies"]],
    }
    json.dump(results, sys.stdout)


def _finish(engine: dict[str, Any], case: dict[str, Any]) -> Any:
    connector = _connector(engine, "kv_consumer")
    request = _request(case)
    if case["scheduled"]:
        connector.update_state_after_alloc(request, _Blocks(len(case["blocks"])), 0)
    kept, params = connector.request_finished_all_groups(request, (case["blocks"],))
    return [kept, params]


def _prefill(engine: dict[str, Any], case: dict[str, Any]) -> Any:
    connector = _connector(engine, "kv_producer")
    request = _request(case)
    count, _ = connector.get_num_new_matched_tokens(request, case["computed"])
    connector.update_state_after_alloc(request, _Blocks(len(case["blocks"])), count)
    reads = [
        len(blocks[0]) if blocks else 0
        for _, blocks, _, _ in connector.connector_scheduler._reqs_need_recv.values()
    ]
    named = {
        name: request.kv_transfer_params.get(name)
        for name in ("remote_num_tokens", "remote_block_ids")
    }
    _, reply = connector.request_finished_all_groups(request, (case["blocks"],))
    return {"count": count, "reads": reads, "named": named, "reply": reply}


def _rewrite(kind: str, reply: dict[str, Any]) -> Any:
    model = _MODELS[kind].model_validate(reply)
    return json.loads(model.model_dump_json(exclude_unset=True))


def _request(case: dict[str, Any]) -> Any:
    tokens = case["tokens"]
    return types.SimpleNamespace(
        request_id=case["request_id"],
        kv_transfer_params=case["params"],
        prompt_token_ids=tokens[: case["prompt_tokens"]],
        prompt_embeds=None,
        num_prompt_tokens=case["prompt_tokens"],
        all_token_ids=tokens,
        num_tokens=len(tokens),
        num_computed_tokens=len(tokens) - 1,
        mm_features=[],
        lora_request=None,
        cache_salt=case["salt"],
        status=_STATUSES[case["ending"]],
        get_skip_reading_prefix_cache=lambda: False,
    )


class _Blocks:
    """Stand-in for KVCacheBlocks: one group of new blocks."""

    def __init__(self, count: int) -> None:
        block = types.SimpleNamespace(block_hash=None, is_null=False)
        self.blocks = ([block] * count,)
        self._ids = (list(range(count)),)

    def get_unhashed_block_ids_all_groups(self) -> tuple[list[int], ...]:
        """Ids by group."""
        return self._ids


def _connector(engine: dict[str, Any], role: str) -> Any:
    os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = engine["host"]
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(engine["port"])
    transfer = KVTransferConfig(
        kv_connector="KvloopConnector",
        kv_connector_module_path="services.worker.connector",
        kv_role=role,
        engine_id=engine["engine_id"],
        kv_buffer_device="cpu",
        kv_connector_extra_config={
            "bidirectional_kv_xfer": True,
            "kv_recompute_threshold": engine["threshold"],
            "decoder_kv_blocks_ttl": engine["ttl"],
        },
    )
    size = engine["block_size"]
    spec = FullAttentionSpec(block_size=size, num_kv_heads=2, head_size=64, dtype=torch.float32)
    cache = KVCacheConfig(
        num_blocks=1000,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    config: Any = types.SimpleNamespace(
        kv_transfer_config=transfer,
        cache_config=types.SimpleNamespace(
            block_size=size, cache_dtype="auto", mamba_cache_mode="none"
        ),
        model_config=types.SimpleNamespace(max_model_len=4096, use_mla=False),
        scheduler_config=types.SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        num_prefill_lookahead_tokens=0,
        speculative_config=None,
        parallel_config=types.SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            data_parallel_size=1,
            data_parallel_rank=0,
            data_parallel_index=0,
        ),
    )
    return KvloopConnector(config, KVConnectorRole.SCHEDULER, cache)


if __name__ == "__main__":
    main()
