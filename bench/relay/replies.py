"""What the fake engines say: bytes in the form and of the size that vLLM's have."""

from __future__ import annotations

import json
from typing import Any

MODEL = "bench"
BIG_BODY = 100_000
"""Bodies of more bytes count as long prompts."""
_BLOCK_SIZE = 16
_SMALL_TOKENS, _BIG_TOKENS = 200, 33_000
_CHUNK: dict[str, Any] = {
    "id": "chatcmpl-8f14e45fceea167a5a36dedd4bea2543",
    "object": "chat.completion.chunk",
    "created": 1764000000,
    "model": MODEL,
    "choices": [
        {"index": 0, "delta": {"content": " token"}, "logprobs": None, "finish_reason": None}
    ],
}
_USAGE = {"prompt_tokens": 200, "total_tokens": 216, "completion_tokens": 16}


def number_of(body: bytes, mark: bytes, default: int) -> int:
    """The integer that follows a mark."""
    at = body.find(mark)
    if at < 0:
        return default
    digits = body[at + len(mark) : at + len(mark) + 12]
    return int(digits[: len(digits) - len(digits.lstrip(b"0123456789"))] or default)


def text_of(body: bytes, mark: bytes) -> str:
    """The text between a mark and the next quotation mark; empty without the mark."""
    at = body.find(mark)
    start = at + len(mark)
    return "" if at < 0 else body[start : body.index(b'"', start)].decode()


def whole(body: bytes) -> bytes:
    """A reply in one piece."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


def _encode(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _event(data: bytes) -> bytes:
    event = b"data: " + data + b"\n\n"
    return b"%x\r\n" % len(event) + event + b"\r\n"


def _params(engine: str, request: str, tokens: int) -> dict[str, Any]:
    return {
        "do_remote_prefill": engine == "engine-p",
        "do_remote_decode": engine == "engine-d",
        "remote_block_ids": [list(range(3000, 3000 + -(-tokens // _BLOCK_SIZE)))],
        "remote_engine_id": engine,
        "remote_request_id": request,
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "remote_num_tokens": tokens,
        "remote_blocks_expiry_time": 123456.789012,
    }


def _prefill_reply(tokens: int) -> bytes:
    report = {
        "prompt_tokens": tokens,
        "proven_tokens": 0,
        "pulled_tokens": 0,
        "cached_tokens": 0,
        "recomputed_tokens": tokens,
        "miss_reason": None,
    }
    params = {**_params("engine-p", "cmpl-p", tokens), "kvloop_report": report}
    choice = {"index": 0, "message": {"role": "assistant", "content": " a"}}
    last = {**choice, "finish_reason": "length"}
    reply = {**_CHUNK, "choices": [last], "usage": _USAGE, "kv_transfer_params": params}
    return whole(_encode(reply))


_HANDLES = {
    tokens: _encode(
        {
            **_params("engine-d", "REQUEST", tokens),
            "kvloop_proof": {
                "version": 2,
                "block_size": _BLOCK_SIZE,
                "step": 32,
                "num_tokens": tokens,
                "digests": "A" * (-(-(tokens // 32 + 1) * 16 // 3) * 4),
            },
        }
    )
    for tokens in (_SMALL_TOKENS, _BIG_TOKENS)
}


def finished_event(turn_id: str, number: int, body_bytes: int) -> bytes:
    """The line by which a decode engine tells the sidecar that it keeps a turn's KV."""
    tokens = _BIG_TOKENS if body_bytes > BIG_BODY else _SMALL_TOKENS
    handle = _HANDLES[tokens].replace(b"REQUEST", b"cmpl-%d" % number)
    return (
        b'{"type":"finished","turn_id":"%s","retained":true,"num_tokens":%d,"num_blocks":%d,'
        b'"ttl_seconds":30.0,"params":%s}\n'
        % (turn_id.encode(), tokens, -(-tokens // _BLOCK_SIZE), handle)
    )


def hello(role: str) -> bytes:
    """First line of the event socket."""
    prefill = role == "prefill"
    said = {
        "type": "hello",
        "contract_version": 2,
        "engine_id": "engine-p" if prefill else "engine-d",
        "epoch": "1",
        "kv_role": "kv_producer" if prefill else "kv_consumer",
        "vllm_version": "0.25.1",
        "nixl_version": "1.5.1",
        "block_size": _BLOCK_SIZE,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "data_parallel_rank": 0,
        "kv_connector": "KvloopConnector",
        "kv_buffer_device": "cuda",
        "side_channel_host": "127.0.0.1",
        "side_channel_port": 5600,
        "max_model_len": 1_000_000,
        "num_kv_blocks": 1_000_000_000,  # retained turns never need to make room
        "bidirectional_kv_xfer": True,
        "decoder_kv_blocks_ttl": 480.0,
        "kv_recompute_threshold": 64,
        "hybrid_kv_cache": False,
        "lease_renewal": False,
        "pin_lease_seconds": 0.0,
        "kv_block_bytes": 0,
        "kv_cache_dtype": "auto",
    }
    return _encode(said) + b"\n"


CHUNK_JSON = _encode(_CHUNK)
"""One token, as chunk."""
TOKEN = _event(CHUNK_JSON)
"""One token, as event of a stream."""
_LAST = {**_CHUNK, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
END_JSON = (_encode(_LAST), _encode({**_CHUNK, "choices": [], "usage": _USAGE}))
"""The chunks that end an answer."""
STREAM_END = b"".join(map(_event, (*END_JSON, b"[DONE]"))) + b"0\r\n\r\n"
"""What ends a stream."""
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
HANDED_OVER = _encode(_params("engine-p", "cmpl-p", _SMALL_TOKENS))
"""Params for the decode leg."""
PREFILL_SMALL = _prefill_reply(_SMALL_TOKENS)
PREFILL_BIG = _prefill_reply(_BIG_TOKENS)
MODELS = _encode({"object": "list", "data": [{"id": MODEL, "max_model_len": 1_000_000}]})
