"""Tracing settings that all services share, so that they are named alike."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from urllib.parse import urlsplit

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from services.common.tracing import NoTracing, Tracing

_NEEDED = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.grpc")


class TracingSettings(BaseSettings):
    """Whether and where a service sends its spans."""

    model_config = SettingsConfigDict(use_attribute_docstrings=True)

    otlp_endpoint: str = ""
    """URL of an OpenTelemetry collector that takes OTLP over gRPC, as in
    http://127.0.0.1:4317; empty: nothing is traced. Needs the extra "tracing"."""

    trace_sample_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of turns to trace among those whose client has not decided; a client
    decides by the flags of its traceparent."""

    @field_validator("otlp_endpoint")
    @classmethod
    def _endpoint_can_be_used(cls, value: str) -> str:
        if not value:
            return value
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{value!r} is not a URL; expected http://host:port")
        try:
            for module in _NEEDED:
                import_module(module)
        except ImportError as error:
            raise ValueError(f"tracing needs `pip install kvloop[tracing]`: {error}") from error
        return value

    @asynccontextmanager
    async def open_tracing(self, service: str, instance: str = "") -> AsyncIterator[Tracing]:
        """Trace as the settings say while the block runs.

        Args:
            service: name of the service.
            instance: name of this process, if it has one.
        """
        if not self.otlp_endpoint:
            yield NoTracing()
            return
        # Not at the top: the SDK is optional, and takes half a second to load.
        from services.common.otlp import open_tracing

        async with open_tracing(
            self.otlp_endpoint,
            service=service,
            instance=instance,
            sample_ratio=self.trace_sample_ratio,
        ) as tracing:
            yield tracing
