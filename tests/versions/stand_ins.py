"""What scenarios play with instead of an engine, its requests and its sidecar.

Importing this module needs the vLLM that the scenario is about on the path.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

BLOCK = 16
NUM_BLOCKS = 100
TTL = 480


@contextmanager
def sidecar_socket() -> Iterator[socket.socket]:
    """The sidecar's listening event socket, made known to connectors."""
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX) as listener:
        path = os.path.join(directory, "events.sock")
        listener.bind(path)
        listener.listen()
        os.environ["KVLOOP_EVENTS_SOCKET"] = path
        os.environ["VLLM_NIXL_ABORT_REQUEST_TIMEOUT"] = str(TTL)
        yield listener


class Events:
    """The sidecar's end of one connector's socket."""

    def __init__(self, listener: socket.socket) -> None:
        listener.settimeout(10)
        self._connection, _ = listener.accept()
        self._received = b""

    def next(self) -> dict[str, Any]:
        """The next line."""
        self._connection.settimeout(10)
        while b"\n" not in self._received:
            data = self._connection.recv(1 << 20)
            assert data, "the connector closed the socket"
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        decoded: dict[str, Any] = json.loads(line)
        return decoded

    def expect_nothing_from(self, connector: Any) -> None:
        """All that the connector has sent was read."""
        sender = connector._events
        until(lambda: sender._outgoing.empty() and sender._unsent is None, "all is sent")
        self._connection.setblocking(False)
        with suppress(BlockingIOError):
            self._received += self._connection.recv(1 << 20)
        assert not self._received, self._received

    def send(self, message: dict[str, Any]) -> None:
        """Ask the connector for something."""
        self._connection.setblocking(True)
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        """Go away, as a sidecar that is restarted."""
        self._connection.close()


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for another thread.

    Raises:
        AssertionError: it takes more than ten seconds.
    """
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.001)


class Blocks:
    """Stand-in for KVCacheBlocks: one group of new blocks."""

    def __init__(self, count: int) -> None:
        block = types.SimpleNamespace(block_hash=None, is_null=False)
        self.blocks = ([block] * count,)
        self._ids = (list(range(count)),)

    def get_unhashed_block_ids_all_groups(self) -> tuple[list[int], ...]:
        """Ids by group."""
        return self._ids


_request_numbers = itertools.count(1)


def make_request(
    prompt: list[int],
    params: dict[str, Any],
    *,
    output: list[int] | None = None,
    salt: str | None = None,
) -> Any:
    """A request as vLLM's scheduler has it when it ends."""
    from vllm.v1.request import RequestStatus

    tokens = [*prompt, *(output or [])]
    return types.SimpleNamespace(
        request_id=f"request-{next(_request_numbers)}",
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


def make_scheduler_output(tokens: int = 0) -> Any:
    """What vLLM's scheduler has for a step that computes so many tokens, of no request."""
    return types.SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=types.SimpleNamespace(req_ids=[]),
        num_scheduled_tokens={},
        total_num_scheduled_tokens=tokens,
    )


def make_connector(
    role: str, engine_id: str, *, parallel: Mapping[str, int] | None = None, **extra_config: object
) -> Any:
    """The connector as vLLM's scheduler makes it.

    Args:
        role: kv_producer or kv_consumer.
        engine_id: name.
        parallel: sizes of vLLM's parallel configuration that are not 1.
        extra_config: members of kv_connector_extra_config.
    """
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
            **extra_config,
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
            **{
                "tensor_parallel_size": 1,
                "pipeline_parallel_size": 1,
                "prefill_context_parallel_size": 1,
                "decode_context_parallel_size": 1,
                "data_parallel_size": 1,
                "data_parallel_rank": 0,
                "data_parallel_index": 0,
            }
            | dict(parallel or {})
        ),
    )
    return KvloopConnector(config, KVConnectorRole.SCHEDULER, cache)


def stand_in_for_orjson() -> None:
    """0.33 imports orjson, a package that only replies need."""
    sys.modules.setdefault("orjson", types.ModuleType("orjson"))


def stand_in_for_gguf() -> None:
    """0.21 imports gguf, a package that only model loading needs."""
    for name, attributes in (
        ("gguf", ("GGUFReader",)),
        ("gguf.constants", ("Keys", "VisionProjectorType")),
        ("gguf.quants", ("GGMLQuantizationType",)),
    ):
        module = types.ModuleType(name)
        module.__dict__.update(dict.fromkeys(attributes, object))
        sys.modules.setdefault(name, module)
