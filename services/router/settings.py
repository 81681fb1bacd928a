"""Settings of the router: environment KVLOOP_ROUTER_*, flags on top."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from limits import parse_many
from pydantic import Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from services.common.addresses import split_host_port
from services.common.tls_settings import PeerTlsSettings, ServerTlsSettings
from services.common.tracing_settings import TracingSettings
from services.router.keys import key_lines, parse_keys


class RouterSettings(ServerTlsSettings, PeerTlsSettings, TracingSettings):
    """The router of kvloop: accepts turns over gRPC and runs their two legs."""

    model_config = SettingsConfigDict(
        env_prefix="KVLOOP_ROUTER_",
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        cli_prog_name="python -m services.router",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
    )

    listen: str = "127.0.0.1:7100"
    """host:port of the gRPC server; an IPv6 host needs brackets."""
    gateway_listen: str = "127.0.0.1:7180"
    """host:port of the OpenAI-compatible HTTP server; empty: there is none."""
    processes: int = Field(default=1, ge=1, le=64)
    """Router processes that share the ports; the kernel spreads connections over
    them. Each needs a core to be of use, and limits turns by itself."""
    kvmeta: str = "127.0.0.1:7200"
    """host:port of kvmeta. The router starts, and serves, without it."""
    metrics_listen: str | None = None
    """host:port of the Prometheus endpoint; none if absent."""

    peer_tls_worker_name: str = ""
    """Name that the certificates of all workers must carry; empty: each the host at
    which it is registered."""

    api_keys_file: Path | None = None
    """File with one 'TENANT SHA256-OF-KEY' per line; read again when it changes.
    Without keys everyone is the tenant "default"."""
    api_keys: str = ""
    """Further keys, as in the file, with commas in place of line ends."""
    isolate_tenants: bool = True
    """Salt the engines' prefix caches by tenant. Only takes effect with API keys;
    switch it off where all keys belong to people who may share."""
    max_running_turns: int = Field(default=0, ge=0)
    """Turns of one tenant for one model that run at once; 0: any number."""
    max_waiting_turns: int = Field(default=1000, ge=0)
    """Turns of one tenant for one model that wait for one to end; more are refused."""
    max_wait_seconds: float = Field(default=30.0, gt=0)
    """How long a turn waits for that before it is refused."""
    rate_limit: str = ""
    """Turns per tenant and period, as in "20/second;1000/hour"; empty: no limit.
    Limits on turns and rates are those of one router process."""
    max_body_bytes: int = Field(default=64 * 1024 * 1024, gt=0)
    """Largest body of an HTTP request."""
    head_timeout_seconds: float = Field(default=10.0, gt=0)
    """How long the head of an HTTP request may take to come."""
    body_timeout_seconds: float = Field(default=30.0, gt=0)
    """How long a small body may take to come."""
    body_bytes_per_second: float = Field(default=16 * 1024, gt=0)
    """A body may take a second more each time that so many bytes have come."""
    derive_conversations: bool = True
    """Recognise HTTP chats without a conversation id by their history. Off, such
    chats reuse nothing and retain nothing."""
    tell_cached_tokens: bool = True
    """Set usage.prompt_tokens_details.cached_tokens in HTTP replies to the prompt
    tokens that were not computed."""

    ledger_timeout_seconds: float = Field(default=0.25, gt=0)
    """How long a turn waits for the ledger before it goes on without a handle."""
    ledger_call_timeout_seconds: float = Field(default=5.0, gt=0)
    """How long a call to the ledger may take. A handle that comes after the turn
    has gone on is given back."""
    registry_retry_seconds: float = Field(default=0.1, gt=0)
    """First pause before the registry is tried again; doubles with each failure."""
    registry_retry_max_seconds: float = Field(default=2.0, gt=0)
    """Longest pause before the registry is tried again."""
    registry_wait_seconds: float = Field(default=5.0, ge=0)
    """How long a router that starts waits for the registry before it opens its ports.
    A load balancer may send it turns as soon as it listens, ready or not."""
    worker_grace_seconds: float = Field(default=30.0, ge=0)
    """How long a worker is kept after a registry that was away no longer lists it.
    Covers the time in which workers register again with a restarted kvmeta."""

    connect_timeout_seconds: float = Field(default=2.0, gt=0)
    """How long a leg waits for a connection to its worker."""
    policy: Literal["least_loaded", "power_of_two", "prefix_affinity", "expected_ttft"] = (
        "expected_ttft"
    )
    """How workers are chosen; see docs/routing.md."""
    ahead_bytes: int = Field(default=16 * 1024, ge=0)
    """Bodies of at least so many bytes go ahead: to the prefill worker while the ledger is
    asked, to the decode worker while prefill works. Their engines read them meanwhile.
    0: none do. Shorter ones would gain less than they cost."""
    worker_failures: int = Field(default=5, ge=1)
    """Turns in a row that fail on a worker that can be reached before it is avoided.
    One that cannot be reached is avoided at once."""
    worker_cooldown_seconds: float = Field(default=2.0, ge=0)
    """How long a worker is avoided then, before one turn tries it again. Doubles each
    time that this fails, ..."""
    worker_cooldown_max_seconds: float = Field(default=30.0, ge=0)
    """... up to this."""
    prefill_timeout_seconds: float = Field(default=60.0, gt=0)
    """How long one attempt at a prefill leg may take, apart from the time for its
    prompt. Then another worker computes it: a prefill worker, or decode."""
    first_chunk_timeout_seconds: float = Field(default=300.0, gt=0)
    """How long the first chunk of a streamed answer may take, likewise; then another
    decode worker is asked. An answer in one piece may take all of the turn's time."""
    next_chunk_timeout_seconds: float = Field(default=300.0, gt=0)
    """How long each further chunk may take; then the answer ends with an error."""
    prompt_bytes_per_second: float = Field(default=4000.0, gt=0)
    """The slowest pace at which engines compute prompts, in bytes of the request's
    body: both legs may take so much longer. 4000 are about 1000 tokens of text; with
    them a body of 4 MB, pictures included, has about 1,000 s more."""
    max_turn_seconds: float = Field(default=3600.0, gt=0)
    """How long a turn may take whose caller sets no deadline or a later one."""
    deadline_margin_seconds: float = Field(default=0.02, ge=0)
    """How much earlier than the caller's the deadline of a leg is, so that the
    leg's error still reaches the caller."""

    estimate_timeout_seconds: float = Field(default=0.5, gt=0)
    """How long a prefill worker may take to tell ExplainRoute what a pull would take."""
    length_check_bytes_per_token: float = Field(default=3.0, gt=0)
    """Bodies of more bytes than this times the model's context are counted before
    prefill, which costs a tokenization more. 1 finds every prompt that is too long, as
    no token is shorter than a byte; 3 finds most, and counts no ordinary text that
    fills less than three quarters of the context."""
    length_check_timeout_seconds: float = Field(default=5.0, gt=0)
    """How long that count may take before it is left to the engine."""

    drain_seconds: float = Field(default=0.0, ge=0)
    """How long new turns are still taken after SIGTERM or SIGINT while health says
    that none should come. Must be more than a load balancer needs to notice."""
    shutdown_grace_seconds: float = Field(default=30.0, ge=0)
    """How long turns in flight may go on after SIGTERM or SIGINT."""
    status_page: bool = True
    """Serve the status page under /ui of the gateway."""

    status_interval_seconds: float = Field(default=2, ge=0.1)
    """How often an open status page is brought up to date."""

    status_max_viewers: int = Field(default=50, ge=1)
    """Status pages open at a time."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severity that is logged."""
    log_json: bool = False
    """Log JSON lines instead of text."""

    @field_validator("listen", "kvmeta", "metrics_listen")
    @classmethod
    def _is_host_port(cls, value: str | None) -> str | None:
        if value is not None:
            split_host_port(value)
        return value

    @field_validator("gateway_listen")
    @classmethod
    def _is_host_port_or_empty(cls, value: str) -> str:
        if value:
            split_host_port(value)
        return value

    @field_validator("api_keys")
    @classmethod
    def _is_key_ring(cls, value: str) -> str:
        parse_keys(key_lines(value))
        return value

    @field_validator("rate_limit")
    @classmethod
    def _is_rate_limit(cls, value: str) -> str:
        if value:
            parse_many(value)
        return value

    @model_validator(mode="after")
    def _settings_fit(self) -> Self:
        if self.ledger_timeout_seconds > self.ledger_call_timeout_seconds:
            raise ValueError("ledger_timeout_seconds must not be above ledger_call_timeout_seconds")
        if self.registry_retry_seconds > self.registry_retry_max_seconds:
            raise ValueError("registry_retry_seconds must not be above registry_retry_max_seconds")
        if self.deadline_margin_seconds >= self.max_turn_seconds:
            raise ValueError("deadline_margin_seconds must be below max_turn_seconds")
        return self
