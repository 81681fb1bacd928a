"""The port to one vLLM server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

DONE = b"[DONE]"
"""Data of the event that ends a stream."""


class Api(StrEnum):
    """An endpoint of the engine, by its path."""

    CHAT_COMPLETIONS = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    TOKENIZE = "/tokenize"


@dataclass(frozen=True)
class EngineModel:
    """A model that the engine serves."""

    name: str
    max_model_len: int


@dataclass(frozen=True)
class TokenCount:
    """How long a prompt is, and how long it may be."""

    tokens: int
    max_model_len: int


@dataclass(frozen=True)
class EngineGauges:
    """The engine's own view of its load."""

    running: int
    """Requests it is running."""
    waiting: int
    """Requests that wait to run."""
    kv_cache_usage: float
    """Share of its KV blocks in use, 0 to 1."""


class Engine(Protocol):
    """What the sidecar asks of vLLM.

    Cancelling any call, or leaving the block of `stream` early, closes the
    connection at once, which makes the engine abort the request.

    All calls raise:
        InvalidFieldError: ENGINE_REJECTED, the engine refused the request.
        ModelNotFoundError: the engine does not serve the model.
        UnsupportedError: ENDPOINT_UNSUPPORTED, it does not have the endpoint.
        InternalError: ENGINE_FAILED, the engine answered with a server error.
        UnavailableError: ENGINE_UNREACHABLE, the request surely never reached
            the engine (metadata reached = "false"); or ENGINE_LOST, the
            connection broke after that.
    """

    async def complete(self, api: Api, body: bytes) -> bytes:
        """Send a request and return the whole reply, as the engine wrote it."""

    def stream(
        self, api: Api, body: bytes
    ) -> AbstractAsyncContextManager[AsyncIterator[Sequence[bytes]]]:
        """Send a request and receive its server-sent events as they come.

        The iterator gives the data of the events that arrived together, down to
        and including `[DONE]`. A stream that ends before is ENGINE_LOST. Streams
        of responses have no `[DONE]`: they end with the body of the reply.
        """

    async def models(self) -> Sequence[EngineModel]:
        """Base models served, without LoRA adapters."""

    async def tokenize(self, body: bytes) -> TokenCount:
        """Count the tokens of a body in the format of /tokenize."""

    async def gauges(self) -> EngineGauges:
        """Read the engine's load."""

    async def healthy(self) -> bool:
        """True if the engine answers and says that it is well. Never raises."""
