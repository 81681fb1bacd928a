"""Settings of one sidecar: environment variables and process flags."""

from __future__ import annotations

import os
import shlex
import socket
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, model_validator
from pydantic_settings import SettingsConfigDict

from services.common.addresses import split_host_port
from services.common.tls_settings import InternalTlsSettings, PeerTlsSettings
from services.common.tracing_settings import TracingSettings
from services.worker.budget import RetentionPolicy
from services.worker.engine_command import OWNED_FLAGS, Role
from services.worker.given_flags import given_flags, with_config_apart
from services.worker.kv_layout import KvLayoutChoice

_ANY_ADDRESS = ("0.0.0.0", "::")


def _host_port(address: str) -> str:
    split_host_port(address)
    return address


HostPort = Annotated[str, AfterValidator(_host_port)]


def _default_listen(fields: dict[str, Any]) -> str:
    return f"127.0.0.1:{_by_role(fields, 7300, 7400)}"


def _default_engine_port(fields: dict[str, Any]) -> int:
    return _by_role(fields, 8100, 8200)


def _default_side_channel_port(fields: dict[str, Any]) -> int:
    return _by_role(fields, 5600, 5700)


def _default_worker_id(fields: dict[str, Any]) -> str:
    _, port = split_host_port(fields["listen"])
    return f"{fields['role']}-{socket.gethostname()}-{port}"


def _default_events_socket(fields: dict[str, Any]) -> Path:
    return _runtime_path(fields["worker_id"], ".sock")


def _default_engine_log(fields: dict[str, Any]) -> Path:
    return _runtime_path(fields["worker_id"], ".log")


def _by_role(fields: dict[str, Any], prefill: int, decode: int) -> int:
    return prefill if fields["role"] == "prefill" else decode


def _runtime_path(worker_id: str, suffix: str) -> Path:
    return Path(tempfile.gettempdir()) / f"kvloop-{os.getuid()}" / f"{worker_id}{suffix}"


class WorkerSettings(InternalTlsSettings, PeerTlsSettings, TracingSettings):
    """The sidecar beside one vLLM server.

    It starts vLLM (or attaches to a running server with --engine-url), registers
    it with kvmeta, and runs the prefill or the decode legs of turns on it. Every
    flag is also an environment variable: --worker-id is KVLOOP_WORKER_WORKER_ID.
    """

    model_config = SettingsConfigDict(
        env_prefix="KVLOOP_WORKER_",
        frozen=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        cli_prog_name="python -m services.worker",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
    )

    role: Role
    """Leg that this worker runs: prefill or decode."""

    listen: HostPort = Field(default_factory=_default_listen)
    """host:port of the sidecar's gRPC server; port 0 takes a free one."""

    advertise: HostPort | None = None
    """host:port where routers reach the sidecar; the listen address if omitted."""

    kvmeta: HostPort = "127.0.0.1:7200"
    """host:port of kvmeta."""

    worker_id: str = Field(default_factory=_default_worker_id, pattern=r"^[\w.-]{1,128}$")
    """Name of the worker, the same after a restart, unique in the deployment."""

    model: str | None = None
    """Model for vLLM: a directory or a hub name. Required unless --engine-url is set."""

    served_model_name: str | None = None
    """Name that clients use. By default the directory's name or the hub name; with
    --engine-url, what the engine serves."""

    engine_url: str | None = None
    """Base URL of a running vLLM server to attach to. Omitted: vLLM is started."""

    engine_port: int = Field(default_factory=_default_engine_port, ge=1, le=65535)
    """Loopback port for vLLM's HTTP server."""

    engine_python: str = sys.executable
    """Python interpreter that has vLLM."""

    engine_args: str = ""
    """Further flags for vLLM, quoted as for a shell, such as "--max-model-len 8192". What
    they give, or a file that they name (--config FILE), takes the place of defaults here."""

    engine_log: Path = Field(default_factory=_default_engine_log)
    """File to which vLLM's output is appended."""

    engine_start_timeout_seconds: PositiveFloat = 1800
    """How long vLLM may take until it answers."""

    engine_stop_grace_seconds: PositiveFloat = 10
    """How long vLLM may take to end before it is killed."""

    events_socket: Path = Field(default_factory=_default_events_socket)
    """Unix socket where the connector inside vLLM reports finished turns; at most
    107 bytes. An attached engine needs the same path in KVLOOP_EVENTS_SOCKET."""

    hello_timeout_seconds: PositiveFloat = 20
    """How long after the engine answers its connector may take to connect."""

    side_channel_host: str = "127.0.0.1"
    """Address of vLLM's NIXL side channel. It must be one that the other workers
    can reach."""

    side_channel_port: int = Field(default_factory=_default_side_channel_port, ge=1, le=65535)
    """Port of vLLM's NIXL side channel; with tensor parallelism the first of several."""

    nixl_backends: str = ""
    """Transports of NIXL for vLLM, with commas, as in LIBFABRIC; empty: vLLM's own
    choice, which is UCX. The same for all workers of a model."""

    kv_recompute_threshold: int = Field(64, ge=0)
    """Tokens below which prefill recomputes instead of pulling."""

    decoder_kv_blocks_ttl_seconds: PositiveInt = 480
    """How long decode keeps a finished turn's KV blocks for its conversation."""

    pin_lease_seconds: int = Field(60, ge=12)
    """How long decode keeps them unless the sidecar renews their lease, where vLLM
    allows renewals: what a crash costs at most. Renewed at a third."""

    retained_blocks_share: float = Field(0.5, gt=0, le=1)
    """Share of decode's KV blocks that may be retained; beyond it the least valuable
    conversations are released."""

    free_blocks_share: float = Field(0.1, ge=0, lt=1)
    """Share of decode's KV blocks to keep free, by releasing likewise."""

    retention_policy: RetentionPolicy = "value"
    """What is released first: value (least chance of a next turn, by the tenant's past
    pauses, times tokens saved) or lru (longest silent)."""

    block_size: PositiveInt | None = None
    """Tokens per KV block. 32 on CPU; on CUDA what --kv-layout comes to."""

    kv_layout: KvLayoutChoice = "auto"
    """How the KV cache lies in memory on CUDA, which decides the speed of pulls:
    cross-layers makes blocks of 64 tokens and keeps all layers of each together (vLLM
    0.21 to 0.25), large-blocks makes blocks of 128, engine-default is vLLM's own choice.
    auto takes the first of them that vLLM and the model allow, and so does cross-layers
    where vLLM ignores it. The same for all workers of a model."""

    platform: Literal["auto", "cpu", "cuda"] = "auto"
    """Which build of vLLM runs: cpu or cuda. auto looks for an NVIDIA GPU."""

    cpu_kv_cache_gib: PositiveInt | None = None
    """Memory for the KV cache of vLLM's CPU build; VLLM_CPU_KVCACHE_SPACE or 1."""

    cpu_threads: PositiveInt | None = None
    """Compute threads of vLLM's CPU build; OMP_NUM_THREADS or 1."""

    engine_max_connections: PositiveInt = 4096
    """Requests in flight to vLLM at most; more wait for a connection."""

    prepared_legs: int = Field(256, ge=0)
    """Legs whose body may be with vLLM before they begin; each has a connection of those
    above, of which they get half at most. 0: none."""

    engine_connect_timeout_seconds: PositiveFloat = 2
    """After that the engine counts as unreachable."""

    engine_poll_seconds: PositiveFloat = 2
    """How often an attached engine's health is checked."""

    lost_turns_share: float = Field(0.01, ge=0, lt=1)
    """Share of a tenant's next turns that may come too late because their
    conversation was given up early: retained KV goes once a longer pause than those
    of all other turns has passed, by the tenant's past pauses. 0: nothing is given up
    before its TTL. Conversations with a longer TTL of their own are left alone.
    Decode workers only."""

    pull_guard: bool = True
    """Hold pulls back while recomputing is faster, by what was measured. Off, all
    that is proven is pulled, however slow the link. Prefill workers only."""

    pull_probe_tokens: PositiveInt = 512
    """Tokens of a probe at most: the small pull by which a link is looked at, at
    first contact and while pulls are held back."""

    pull_probe_turns: PositiveInt = 16
    """Turns without a pull after which a link that is held back is probed."""

    pull_probe_seconds: PositiveFloat = 30
    """Time without a pull after which it is probed. A probe waits for a prompt so
    long that it adds no more than 8 % to the leg."""

    pull_probe_overdue_seconds: PositiveFloat = 300
    """Time without a pull after which a probe waits for nothing."""

    event_timeout_seconds: PositiveFloat = 1
    """How long after the end of an answer the connector may take to report it."""

    commit_timeout_seconds: PositiveFloat = 2
    """How long the end of an answer is held back for the ledger. Once that was in vain,
    others are held back for 50 ms each until the ledger answers again."""

    settle_timeout_seconds: PositiveFloat = 30
    """How long the sidecar asks the ledger, in the background, what became of a
    commit whose reply was lost."""

    lease_ttl_seconds: PositiveFloat = 15
    """Lease to ask of the registry; it is renewed at a third."""

    drain_seconds: float = Field(0, ge=0)
    """How long calls are still answered after SIGTERM or SIGINT while no new legs are
    taken, so that routers, which hear of it from kvmeta, turn to other workers. A prefill
    engine lives on for as long again if legs were in flight: decode reads their KV."""

    grace_seconds: PositiveFloat = 30
    """How long legs in flight may take to end at shutdown."""

    metrics_listen: HostPort | None = None
    """host:port for Prometheus metrics; none if omitted."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level that is logged."""

    log_json: bool = False
    """Log JSON lines instead of text."""

    @property
    def model_name(self) -> str | None:
        """Served model name as far as settings say; None: whatever the engine serves."""
        if self.served_model_name is not None or self.model is None:
            return self.served_model_name
        path = Path(self.model)
        return path.resolve().name if path.is_dir() else self.model

    @property
    def engine_base_url(self) -> str:
        """Where the engine's HTTP server is."""
        return self.engine_url or f"http://127.0.0.1:{self.engine_port}"

    @property
    def prepared_legs_limit(self) -> int:
        """prepared_legs, as far as other requests still find connections."""
        return min(self.prepared_legs, self.engine_max_connections // 2)

    @property
    def nixl_backend_names(self) -> list[str]:
        """nixl_backends as a list."""
        return [name.strip() for name in self.nixl_backends.split(",") if name.strip()]

    @property
    def extra_engine_args(self) -> list[str]:
        """engine_args as a list, as vLLM reads all of them."""
        return with_config_apart(shlex.split(self.engine_args))

    @model_validator(mode="after")
    def _check(self) -> WorkerSettings:
        if self.engine_url is None and self.model is None:
            raise ValueError("set --model to start vLLM, or --engine-url to attach to one")
        if self.engine_url is not None and not urlsplit(self.engine_url).netloc:
            raise ValueError("--engine-url is not a URL; expected http://host:port")
        host, _ = split_host_port(self.listen)
        if self.advertise is None and host in _ANY_ADDRESS:
            raise ValueError(
                f"--listen {self.listen} takes calls for every address of this host; "
                "say with --advertise which one routers shall use"
            )
        given = given_flags(self.extra_engine_args)
        for flag in OWNED_FLAGS:
            if flag in given:
                raise ValueError(f"{flag} in --engine-args: the sidecar sets it itself")
        return self
