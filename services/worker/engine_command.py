"""How vLLM is started: its command line and its environment. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from services.worker.engine_events import EVENTS_SOCKET
from services.worker.given_flags import GivenFlags
from services.worker.kv_layout import MODEL_RUNNER, KvLayout, Platform
from services.worker.transport import GET_ZCOPY

OWNED_FLAGS = (
    "--model",
    "--served-model-name",
    "--host",
    "--port",
    "--kv-transfer-config",
)
"""Flags of vLLM that the sidecar sets itself, whatever else is given."""

_DEFAULTS = (("--disable-uvicorn-access-log",),)
_CPU_DEFAULTS = (
    ("--dtype", "float32"),
    ("--enforce-eager",),
    ("--max-num-seqs", "16"),
)
_CONNECTOR_CLASS = "KvloopConnector"
_CONNECTOR_MODULE = "services.worker.connector"


Role = Literal["prefill", "decode"]
"""Leg that a worker runs."""


ENGINE_KEEP_ALIVE_SECONDS = 75
"""How long an engine keeps idle connections, so that the next turn of a conversation
need not open new ones."""
CONNECTION_SECONDS = 0.8 * ENGINE_KEEP_ALIVE_SECONDS
"""How long its clients keep them: no request shall meet one that the engine is closing."""


@dataclass(frozen=True)
class EngineOptions:
    """What decides how vLLM is started."""

    role: Role
    platform: Platform
    python: str
    model: str
    model_is_local: bool
    served_model_name: str
    port: int
    side_channel_host: str
    side_channel_port: int
    events_socket: Path
    import_root: Path
    """Directory from which the engine can import the connector."""
    kv_recompute_threshold: int
    decoder_kv_blocks_ttl_seconds: int
    pin_lease_seconds: int
    kv_layout: KvLayout
    cpu_kv_cache_gib: int | None
    cpu_threads: int | None
    extra_args: Sequence[str]
    given: GivenFlags
    """What `extra_args` say, and a file that they name."""
    nixl_backends: Sequence[str] = ()
    """Empty: vLLM's own choice."""


@dataclass(frozen=True)
class EngineCommand:
    """A command line and its environment."""

    argv: Sequence[str]
    required_env: Mapping[str, str]
    """Variables that settings ask for, or without which sidecar and engine do not
    fit together."""
    default_env: Mapping[str, str]
    """Variables that the operator's own environment may override."""

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """The engine's environment on top of the sidecar's own."""
        environment = {**self.default_env, **base, **self.required_env}
        if inherited := base.get("PYTHONPATH"):
            environment["PYTHONPATH"] += f":{inherited}"
        return environment


def engine_command(options: EngineOptions) -> EngineCommand:
    """The command that starts vLLM for one leg.

    Flags that are given take the place of defaults. `extra_args` come last.
    """
    argv = [
        options.python,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        options.model,
        "--served-model-name",
        options.served_model_name,
        "--host",
        "127.0.0.1",
        "--port",
        str(options.port),
        "--kv-transfer-config",
        json.dumps(_kv_transfer_config(options)),
    ]
    for default in _DEFAULTS + (_CPU_DEFAULTS if options.platform == "cpu" else ()):
        if default[0] not in options.given:
            argv += default
    if options.kv_layout.block_size is not None:
        argv += ["--block-size", str(options.kv_layout.block_size)]
    required = {
        EVENTS_SOCKET: str(options.events_socket),
        "PYTHONPATH": str(options.import_root),
        "PYTHONHASHSEED": "0",  # both engines must hash prefixes alike
        "PYTHONUNBUFFERED": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(ENGINE_KEEP_ALIVE_SECONDS),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": options.side_channel_host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(options.side_channel_port),
        # vLLM 0.21 to 0.23 keep blocks for this long; decoder_kv_blocks_ttl is newer.
        "VLLM_NIXL_ABORT_REQUEST_TIMEOUT": str(options.decoder_kv_blocks_ttl_seconds),
    }
    if options.kv_layout.cross_layers:
        required[MODEL_RUNNER] = "0"
    defaults = {"VLLM_NO_USAGE_STATS": "1"}
    if options.model_is_local:
        defaults["HF_HUB_OFFLINE"] = "1"
    if options.platform == "cpu":
        defaults |= {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "UCX_TLS": "tcp,self,sm,cma,posix,sysv",
        }
        if options.cpu_kv_cache_gib is not None:
            required["VLLM_CPU_KVCACHE_SPACE"] = str(options.cpu_kv_cache_gib)
        if options.cpu_threads is not None:
            required["OMP_NUM_THREADS"] = str(options.cpu_threads)
    else:
        # Without it UCX falls back to TCP, silently, where it sees no NVLink.
        defaults[GET_ZCOPY] = "y"
    return EngineCommand([*argv, *options.extra_args], required, defaults)


def _kv_transfer_config(options: EngineOptions) -> dict[str, Any]:
    extra: dict[str, Any] = {
        "bidirectional_kv_xfer": True,
        "kv_recompute_threshold": options.kv_recompute_threshold,
        "decoder_kv_blocks_ttl": options.decoder_kv_blocks_ttl_seconds,
        "kvloop_pin_lease": options.pin_lease_seconds,
    }
    if options.nixl_backends:
        extra["backends"] = list(options.nixl_backends)
    if options.kv_layout.cross_layers:
        extra["enable_cross_layers_blocks"] = True
    return {
        "kv_connector": _CONNECTOR_CLASS,
        "kv_connector_module_path": _CONNECTOR_MODULE,
        "kv_role": "kv_producer" if options.role == "prefill" else "kv_consumer",
        "kv_buffer_device": "cpu" if options.platform == "cpu" else "cuda",
        # A broken pull costs time, not the request.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
