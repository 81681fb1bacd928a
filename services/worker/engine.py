"""The port to one vLLM server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
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


class BegunRequest(Protocol):
    """A request of which the engine gets the beginning before the rest is known.

    Somebody runs it; somebody else finishes it, and then reads the reply once, by
    `stream` or `complete`. Whoever has it last closes it.
    """

    async def run(self) -> None:
        """Send the beginning, and the rest when it is there. Returns when the reply has
        begun, or surely will not. Never fails: `finish` does. Cancelling it closes the
        connection, unless the reply has begun."""

    async def finish(self, rest: bytes) -> bool:
        """Give the rest, and wait until the reply begins. Cancelling it is as `close`.

        Returns:
            False if the engine surely did not get the whole request: it was not reached,
            the connection broke, or it refused what it had of it.

        Raises:
            KvloopError: as for the Engine port.
        """

    def stream(self) -> AbstractAsyncContextManager[AsyncIterator[Sequence[bytes]]]:
        """Receive the reply as `Engine.stream` does, with all that holds for it."""

    async def complete(self) -> bytes:
        """The whole reply, as `Engine.complete` returns it."""

    def close(self) -> None:
        """Give it up: the connection is closed at once, unless the reply was read to its
        end. May be called again, and before `run`."""


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

    def begin(self, api: Api, head: bytes, headers: Mapping[str, str]) -> BegunRequest:
        """Begin a request whose body is not all there yet. Never fails.

        Args:
            api: endpoint to ask.
            head: beginning of the body; with `}` behind it, it is a JSON object.
            headers: what the request carries besides, such as a trace's context.
        """

    async def models(self) -> Sequence[EngineModel]:
        """Base models served, without LoRA adapters."""

    async def tokenize(self, body: bytes) -> TokenCount:
        """Count the tokens of a body in the format of /tokenize."""

    async def gauges(self) -> EngineGauges:
        """Read the engine's load."""

    async def healthy(self) -> bool:
        """True if the engine answers and says that it is well. Never raises."""
