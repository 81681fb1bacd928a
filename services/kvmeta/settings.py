"""Settings of kvmeta: flags, or environment variables KVLOOP_KVMETA_*."""

from __future__ import annotations

from typing import Literal, Self

import sqlalchemy as sa
from pydantic import Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from services.common.addresses import split_host_port
from services.common.tls_settings import InternalTlsSettings
from services.common.tracing_settings import TracingSettings
from services.kvmeta.deadlines import Policy
from services.kvmeta.model import MICROSECONDS

_POSTGRES_OPTIONS = frozenset(
    {
        *("host", "port", "user", "password", "passfile", "service", "servicefile", "ssl"),
        *("krbsrvname", "gsslib", "target_session_attrs", "prepared_statement_cache_size"),
    }
)
"""What may follow the ? of a URL: those that asyncpg takes as text, and SQLAlchemy's."""


class KvmetaSettings(InternalTlsSettings, TracingSettings):
    """The conversation ledger and the worker registry of kvloop."""

    model_config = SettingsConfigDict(
        env_prefix="KVLOOP_KVMETA_",
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_implicit_flags=True,
        cli_prog_name="python -m services.kvmeta",
        cli_avoid_json=True,
    )

    listen: str = "127.0.0.1:7200"
    """host:port of the gRPC server; port 0 takes a free one."""

    database_url: str = "sqlite:///kvmeta.db"
    """Where the ledger is kept: sqlite:///FILE (one process),
    postgresql://USER@HOST/NAME (any number of processes), or memory: (forgotten
    at exit). A driver in the scheme, as in sqlite+aiosqlite, is ignored."""

    metrics_listen: str | None = None
    """host:port of the Prometheus endpoint; none if absent."""

    postgres_pool_size: int = Field(default=16, ge=1, le=256)
    """Connections to PostgreSQL."""

    handle_margin_seconds: float = Field(default=5, ge=0)
    """Handles stop being given out this long before the engine drops the blocks
    by itself, or a tenth of the engine's TTL before, whichever is less."""

    handle_ttl_seconds: float | None = Field(default=None, gt=0)
    """How long handles are given out after a commit, for conversations without a
    TTL of their own. Unset: for as long as their worker keeps the blocks. Workers
    whose engine keeps blocks for less are refused."""

    max_retention_seconds: float = Field(default=3600, gt=0)
    """Longest TTL that a conversation may be given where its worker can renew the
    pin. Workers without renewal keep blocks for their engine's TTL at most."""

    lease_ttl_seconds: float = Field(default=15, gt=0)
    """Lease of a worker that asks for none."""

    min_lease_ttl_seconds: float = Field(default=1, gt=0)
    """Shortest lease granted; shorter wishes are raised to it."""

    max_lease_ttl_seconds: float = Field(default=300, gt=0)
    """Longest lease granted; longer wishes are lowered to it."""

    max_params_bytes: int = Field(default=64 * 1024 * 1024, ge=1, le=100 * 1024 * 1024)
    """Largest transfer params of one handle. Block lists and digests of a
    1M-token context take about 2 MiB."""

    max_conversations_per_tenant: int = Field(default=1_000_000, ge=1)
    """Conversations that the ledger remembers for one tenant, dead ones included."""

    sweep_interval_seconds: float = Field(default=1, gt=0)
    """How often expired handles and leases are looked for."""

    sweep_batch_rows: int = Field(default=100, ge=1, le=10_000)
    """Rows that one transaction of the sweeper changes; takes go on in between."""

    dead_retention_seconds: float = Field(default=7200, gt=0)
    """How long a conversation without a usable handle, or a removed worker, is
    remembered. Must exceed the longest turn: a turn that commits after its
    conversation was forgotten cannot be told from a new one."""

    release_retention_seconds: float = Field(default=600, gt=0)
    """How long a release is remembered after the engine dropped the blocks itself."""

    watch_poll_seconds: float = Field(default=1, gt=0)
    """How often watchers look for changes that other processes made."""

    clock_mark_seconds: float = Field(default=1, gt=0)
    """How often the ledger's time is stored."""

    drain_seconds: float = Field(default=0, ge=0)
    """How long calls are still taken after SIGTERM or SIGINT while health says
    NOT_SERVING, so that clients go over to other replicas. Half a second will do
    where there are some."""

    shutdown_grace_seconds: float = Field(default=1, ge=0)
    """Time that calls in flight get when the process is asked to stop."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe log events shown."""

    log_json: bool = False
    """Log JSON lines instead of text for people."""

    @field_validator("listen", "metrics_listen")
    @classmethod
    def _is_an_address(cls, value: str | None) -> str | None:
        if value is not None:
            split_host_port(value)
        return value

    @field_validator("database_url")
    @classmethod
    def _database_is_supported(cls, value: str) -> str:
        if value == "memory:":
            return value
        try:
            url = sa.make_url(value)
        except (sa.exc.ArgumentError, ValueError):  # whose texts may hold a password
            raise ValueError(
                "not a database URL, as in sqlite:///kvmeta.db or postgresql://USER@HOST/NAME"
            ) from None
        if url.get_backend_name() == "sqlite":
            if url.database in (None, "", ":memory:"):
                raise ValueError("a SQLite URL needs a file, as in sqlite:///kvmeta.db")
        elif url.get_backend_name() != "postgresql":
            raise ValueError(f"{url.get_backend_name()} is not supported; use sqlite or postgresql")
        elif "sslmode" in url.query:
            raise ValueError("sslmode is called ssl here, as in ?ssl=verify-full")
        elif unknown := url.query.keys() - _POSTGRES_OPTIONS:
            raise ValueError(
                f"no such option: {', '.join(sorted(unknown))}; "
                f"there are {', '.join(sorted(_POSTGRES_OPTIONS))}"
            )
        elif "@" in (url.host or ""):
            raise ValueError("an @ in a user's name or password is written %40")
        return value

    @model_validator(mode="after")
    def _lease_bounds_are_ordered(self) -> Self:
        shortest, longest = self.min_lease_ttl_seconds, self.max_lease_ttl_seconds
        if not shortest <= self.lease_ttl_seconds <= longest:
            raise ValueError(
                f"lease_ttl_seconds is {self.lease_ttl_seconds:g}, not between "
                f"min_lease_ttl_seconds ({shortest:g}) and max_lease_ttl_seconds ({longest:g})"
            )
        return self

    def policy(self) -> Policy:
        """The durations and limits that the rules need."""
        handle_ttl = self.handle_ttl_seconds
        return Policy(
            handle_margin_us=microseconds(self.handle_margin_seconds),
            handle_ttl_us=None if handle_ttl is None else microseconds(handle_ttl),
            max_retention_us=microseconds(self.max_retention_seconds),
            dead_retention_us=microseconds(self.dead_retention_seconds),
            release_retention_us=microseconds(self.release_retention_seconds),
            max_conversations=self.max_conversations_per_tenant,
        )


def microseconds(seconds: float) -> int:
    """Seconds as integer microseconds."""
    return round(seconds * MICROSECONDS)
