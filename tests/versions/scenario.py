"""Drives the connector's scheduler half against one version of vLLM's sources.

Run in a process of its own, with that version first on PYTHONPATH; prints "ok".
Native code is not needed: the scheduler half of NixlConnector is plain Python.
Engine, requests and blocks are stand-ins; NixlConnector, its scheduler, block
hashing, KVTransferConfig and KV cache specs are the version's own.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import types
from typing import Any

BLOCK = 16
NUM_BLOCKS = 100
TTL = 480


def main() -> None:
    """Play two turns and check what the connector does with them."""
    _stand_in_for_gguf()
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "events.sock")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen()
        os.environ["KVLOOP_EVENTS_SOCKET"] = path
        os.environ["VLLM_NIXL_ABORT_REQUEST_TIMEOUT"] = str(TTL)
        decode = _connector("kv_consumer", "engine-d")
        events = _Events(listener)
        _check_hello(events.next())
        prompt = list(range(1000, 1000 + 5 * BLOCK + 3))
        handle = _first_turn(decode, events, prompt)
        prefill = _connector("kv_producer", "engine-p")
        events_of_prefill = _Events(listener)
        assert events_of_prefill.next()["engine_id"] == "engine-p"
        _second_turns(prefill, handle, [*prompt, *_answer()])
        _aborted_before_prefill(prefill, handle, [*prompt, *_answer()])
        _not_retained(decode, events, prompt)
        _aborted(decode, events, prompt)
        _released(decode, events, handle)
        _extra_keys_matter(decode, prefill, events, prompt)
        decode.shutdown()
        prefill.shutdown()
        listener.close()
    sys.stdout.write("ok\n")


def _answer() -> list[int]:
    return list(range(2000, 2000 + 2 * BLOCK))


def _check_hello(hello: dict[str, Any]) -> None:
    assert hello["type"] == "hello", hello
    assert hello["engine_id"] == "engine-d"
    assert hello["block_size"] == BLOCK
    assert hello["num_kv_blocks"] == NUM_BLOCKS
    assert hello["decoder_kv_blocks_ttl"] == TTL, hello
    assert hello["bidirectional_kv_xfer"] is True
    assert hello["hybrid_kv_cache"] is False


def _first_turn(decode: Any, events: _Events, prompt: list[int]) -> dict[str, Any]:
    """A finished decode leg leaves a handle with a proof, also in its event."""
    request = _request(prompt, {"kvloop_turn_id": "turn-1"}, output=_answer())
    decode.update_state_after_alloc(request, _Blocks(8), 0)
    assert request.request_id in decode.connector_scheduler._reqs_in_batch
    delay, handle = decode.request_finished_all_groups(request, (list(range(10, 18)),))
    assert delay
    total = len(prompt) + len(_answer()) - 1
    assert handle["remote_num_tokens"] == total, handle
    assert handle["do_remote_decode"] is True
    event = events.next()
    assert event["turn_id"] == "turn-1"
    assert event["retained"] is True
    assert event["num_tokens"] == total
    assert event["num_blocks"] == -(-total // BLOCK)
    assert event["ttl_seconds"] == TTL
    assert list(event)[-1] == "params"
    assert event["params"] == json.loads(json.dumps(handle))
    return dict(event["params"])


def _second_turns(prefill: Any, handle: dict[str, Any], history: list[int]) -> None:
    """Prompts that extend, shorten, edit or replace the retained sequence."""
    total = handle["remote_num_tokens"]
    cases: list[tuple[str, list[int], int, str | None]] = [
        ("extends", [*history, 7, 8, 9], total, None),
        ("shorter", history[: 5 * BLOCK + 1], 5 * BLOCK, None),
        ("edited late", [*history[: 6 * BLOCK], 1, *history[6 * BLOCK + 1 :]], 6 * BLOCK, None),
        ("edited early", [1, *history[1:]], 0, "PREFIX_MISMATCH"),
    ]
    for name, prompt, proven, miss in cases:
        params = {**json.loads(json.dumps(handle)), "kvloop_turn_id": name}
        request = _request(prompt, params)
        asked = prefill.get_num_new_matched_tokens(request, 0)
        assert asked == (proven, proven > 0), (name, asked)
        assert prefill.get_num_new_matched_tokens(request, 0) == asked, "asking again changes it"
        assert params["remote_num_tokens"] == proven
        if proven:
            assert [len(group) for group in params["remote_block_ids"]] == [-(-proven // BLOCK)]
        prefill.update_state_after_alloc(request, _Blocks(8), proven)
        # After the one read, a preempted request must not ask for another.
        assert prefill.get_num_new_matched_tokens(request, 0) == (0, False)
        _, reply = prefill.request_finished_all_groups(request, (list(range(8)),))
        report = reply["kvloop_report"]
        assert report["proven_tokens"] == proven, (name, report)
        assert report["miss_reason"] == miss, (name, report)
        assert report["prompt_tokens"] == len(prompt)
        parts = ("pulled_tokens", "cached_tokens", "recomputed_tokens")
        assert sum(report[part] for part in parts) == len(prompt), (name, report)

    for name, cached, miss in (("cached", total, "CACHED"), ("few left", total - BLOCK, None)):
        request = _request([*history, 7], {**json.loads(json.dumps(handle))})
        count, _ = prefill.get_num_new_matched_tokens(request, cached)
        assert count == 0, (name, count)
        prefill.update_state_after_alloc(request, _Blocks(8), 0)
        _, reply = prefill.request_finished_all_groups(request, (list(range(8)),))
        assert reply["kvloop_report"]["miss_reason"] == (miss or "BELOW_THRESHOLD"), name
        assert reply["kvloop_report"]["cached_tokens"] == cached

    for broken in ({}, {"kvloop_proof": None}, {"kvloop_proof": {"version": 99}}):
        params = {key: value for key, value in handle.items() if key != "kvloop_proof"} | broken
        request = _request([*history, 7], params)
        assert prefill.get_num_new_matched_tokens(request, 0) == (0, False), broken
        prefill.update_state_after_alloc(request, _Blocks(8), 0)
        _, reply = prefill.request_finished_all_groups(request, (list(range(8)),))
        assert reply["kvloop_report"]["miss_reason"] == "UNPROVABLE"


def _aborted_before_prefill(prefill: Any, handle: dict[str, Any], history: list[int]) -> None:
    """A handle whose request never ran still lets the decode engine free its blocks."""
    from vllm.v1.request import RequestStatus

    reads = prefill.connector_scheduler._reqs_need_recv
    for asked in (False, True):
        reads.clear()
        request = _request([*history, 7], json.loads(json.dumps(handle)))
        if asked:
            prefill.get_num_new_matched_tokens(request, 0)
        request.status = RequestStatus.FINISHED_ABORTED
        assert prefill.request_finished_all_groups(request, ([],)) == (False, None)
        assert request.request_id in reads, asked
        assert not any(reads[request.request_id][1]), "it must read nothing"


def _not_retained(decode: Any, events: _Events, prompt: list[int]) -> None:
    request = _request(prompt, {"kvloop_turn_id": "no-conversation", "kvloop_retain": False})
    assert decode.request_finished_all_groups(request, ([1, 2],)) == (False, None)
    event = events.next()
    assert (event["retained"], event["params"]) == (False, None)
    assert request.request_id in decode.connector_scheduler._reqs_not_processed


def _aborted(decode: Any, events: _Events, prompt: list[int]) -> None:
    from vllm.v1.request import RequestStatus

    request = _request(prompt, {"kvloop_turn_id": "aborted"})
    request.status = RequestStatus.FINISHED_ABORTED
    assert decode.request_finished_all_groups(request, ([1, 2],)) == (False, None)
    assert events.next()["retained"] is False


def _released(decode: Any, events: _Events, handle: dict[str, Any]) -> None:
    """A release from the sidecar reaches the workers with the next step."""
    request_id = handle["remote_request_id"]
    decode.connector_scheduler._reqs_need_send.clear()
    events.send({"type": "release", "request_ids": [request_id]})
    output = types.SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=types.SimpleNamespace(req_ids=[]),
        num_scheduled_tokens={},
        total_num_scheduled_tokens=0,
    )
    for _ in range(200):
        meta = decode.build_connector_meta(output)
        if request_id in meta.reqs_to_send:
            return
        events.wait()
    raise AssertionError("the release never reached the workers")


def _extra_keys_matter(decode: Any, prefill: Any, events: _Events, prompt: list[int]) -> None:
    """Equal tokens under another cache salt prove nothing."""
    request = _request(prompt, {"kvloop_turn_id": "salted"}, output=_answer(), salt="tenant-a")
    decode.request_finished_all_groups(request, (list(range(8)),))
    handle = events.next()["params"]
    for salt, proven in (("tenant-a", handle["remote_num_tokens"]), ("tenant-b", 0), (None, 0)):
        follow_up = [*prompt, *_answer(), 5]
        asking = _request(follow_up, json.loads(json.dumps(handle)), salt=salt)
        assert prefill.get_num_new_matched_tokens(asking, 0) == (proven, proven > 0), salt


class _Events:
    """The sidecar's end of one connector's socket."""

    def __init__(self, listener: socket.socket) -> None:
        listener.settimeout(10)
        self._connection, _ = listener.accept()
        self._connection.settimeout(10)
        self._lines = self._connection.makefile("rb")

    def next(self) -> dict[str, Any]:
        line = self._lines.readline()
        assert line, "the connector closed the socket"
        decoded: dict[str, Any] = json.loads(line)
        return decoded

    def send(self, message: dict[str, Any]) -> None:
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def wait(self) -> None:
        import time

        time.sleep(0.01)


class _Blocks:
    """Stand-in for KVCacheBlocks: one group of new blocks."""

    def __init__(self, count: int) -> None:
        block = types.SimpleNamespace(block_hash=None, is_null=False)
        self.blocks = ([block] * count,)
        self._ids = (list(range(count)),)

    def get_unhashed_block_ids_all_groups(self) -> tuple[list[int], ...]:
        return self._ids


_next_request = iter(range(1, 1_000_000))


def _request(
    prompt: list[int],
    params: dict[str, Any],
    *,
    output: list[int] | None = None,
    salt: str | None = None,
) -> Any:
    from vllm.v1.request import RequestStatus

    tokens = [*prompt, *(output or [])]
    return types.SimpleNamespace(
        request_id=f"request-{next(_next_request)}",
        kv_transfer_params=params,
        prompt_token_ids=prompt,
        prompt_embeds=None,
        num_prompt_tokens=len(prompt),
        all_token_ids=tokens,
        num_tokens=len(tokens),
        num_computed_tokens=len(tokens) - 1,
        mm_features=[],
        lora_request=None,
        cache_salt=salt,
        status=RequestStatus.FINISHED_LENGTH_CAPPED,
        get_skip_reading_prefix_cache=lambda: False,
    )


def _connector(role: str, engine_id: str) -> Any:
    """The connector as vLLM's scheduler makes it."""
    import torch
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.platforms import current_platform
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    from services.worker.connector import KvloopConnector

    transfer = KVTransferConfig(
        kv_connector="KvloopConnector",
        kv_connector_module_path="services.worker.connector",
        kv_role=role,
        engine_id=engine_id,
        # Sources without native code may not recognise the platform.
        kv_buffer_device="cpu" if current_platform.device_type == "cpu" else "cuda",
        kv_connector_extra_config={
            "bidirectional_kv_xfer": True,
            "kv_recompute_threshold": 64,
            "decoder_kv_blocks_ttl": TTL,
        },
    )
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.float32)
    cache = KVCacheConfig(
        num_blocks=NUM_BLOCKS,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    config = types.SimpleNamespace(
        kv_transfer_config=transfer,
        cache_config=types.SimpleNamespace(
            block_size=BLOCK, cache_dtype="auto", mamba_cache_mode="none"
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


def _stand_in_for_gguf() -> None:
    """0.21 imports gguf, a package that only model loading needs."""
    for name, attributes in (
        ("gguf", ("GGUFReader",)),
        ("gguf.constants", ("Keys", "VisionProjectorType")),
        ("gguf.quants", ("GGMLQuantizationType",)),
    ):
        module = types.ModuleType(name)
        module.__dict__.update(dict.fromkeys(attributes, object))
        sys.modules.setdefault(name, module)


if __name__ == "__main__":
    main()
