"""The synchronous client."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, Unpack

from kvloop import rpc
from kvloop.chunks import Chunk
from kvloop.completions import Assembler, Completion
from kvloop.messages import Message
from kvloop.requests import Sampling, chat_request, generate_request
from kvloop.router.v1 import router_pb2, router_pb2_grpc
from kvloop.routes import EndedConversation, ModelInfo, Route, parse_models, parse_route
from kvloop.tls import TlsSource
from kvloop.trace_context import trace_context

DEFAULT_ROUTER = "127.0.0.1:7100"
UNARY_TIMEOUT_SECONDS = 10.0
"""Deadline of the calls that run no model."""


def key_from_environment() -> str:
    """The API key that clients use if they are given none; empty if there is none."""
    return os.environ.get("KVLOOP_API_KEY", "")


if TYPE_CHECKING:
    Event = router_pb2.ChatResponse | router_pb2.GenerateResponse

    class _Call(Protocol):
        """A running call: its events, and a way to stop it."""

        def __iter__(self) -> Iterator[Event]: ...
        def __next__(self) -> Event: ...
        def cancel(self) -> Any: ...


class Answer(Iterator[Chunk]):
    """An answer that is being generated. Made by `Client.chat` and `generate`.

    Iterate to get chunks as the engine writes them, or call `collect()` for the
    whole. Leaving the `with` block, `close()`, and dropping the last reference
    cancel a call that is still running; both engines then stop working on it.

        with client.chat(messages, model="tiny") as answer:
            for chunk in answer:
                print(chunk.text, end="")
        print(answer.collect().receipt)
    """

    def __init__(self, call: _Call) -> None:
        self._call = call
        self._assembler = Assembler()
        self._ready: deque[Chunk] = deque()
        self._closed = False
        self._ended = False

    def __next__(self) -> Chunk:
        if self._ready:
            return self._ready.popleft()
        if self._closed or self._ended:
            raise StopIteration
        try:
            with rpc.typed_errors():
                for event in self._call:
                    self._ready.extend(self._assembler.add(event))
                    if self._ready:
                        return self._ready.popleft()
        except BaseException:  # Ctrl-C included: leave no engine working for nobody
            self.close()
            raise
        self._ended = True
        self._assembler.finished()
        raise StopIteration

    def collect(self) -> Completion:
        """The whole answer; waits for what has not come yet.

        Raises:
            KvloopError: the turn failed.
            RuntimeError: the answer was closed before its end.
        """
        for _ in self:
            pass
        if self._closed and self._assembler.completion is None:
            raise RuntimeError("the answer was closed before its end")
        return self._assembler.finished()

    def close(self) -> None:
        """Stop the call. Harmless when it has ended."""
        self._closed = True
        self._ready.clear()
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class Client:
    """Talks to a kvloop router.

    A client holds one connection and may be shared by threads. Every method
    raises classes of `kvloop.errors`, never gRPC's own. Where the caller uses
    OpenTelemetry, turns belong to the trace of its current span.

        from kvloop import Client

        history = [{"role": "user", "content": "Hello!"}]
        with Client("127.0.0.1:7100") as client:
            done = client.chat(history, model="tiny", conversation_id="c1").collect()
            history += [done.message, {"role": "user", "content": "Go on."}]
            done = client.chat(history, model="tiny", conversation_id="c1").collect()
            print(done.text, done.receipt.pulled_tokens)

    Args:
        router: host:port of any router.
        api_key: key that names the tenant; by default $KVLOOP_API_KEY.
        tls: how to speak TLS, a `ClientTls` or `ClientTlsFiles`; without it the
            connection is not encrypted.
    """

    def __init__(
        self,
        router: str = DEFAULT_ROUTER,
        *,
        api_key: str | None = None,
        tls: TlsSource | None = None,
    ) -> None:
        self._channel = rpc.make_channel(router, tls)
        self._metadata = rpc.bearer(key_from_environment() if api_key is None else api_key)
        self._stub = router_pb2_grpc.RouterServiceStub(self._channel)

    def chat(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        model: str,
        conversation_id: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str | Mapping[str, Any] | None = None,
        extra_body: Mapping[str, Any] | None = None,
        client_request_id: str = "",
        disable_reuse: bool = False,
        timeout_seconds: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> Answer:
        """Run one chat turn.

        Args:
            messages: the whole history, oldest first, ending in the new message.
            model: served model name.
            conversation_id: conversation this turn belongs to. Without it
                nothing is looked up and nothing is retained.
            tools: functions the model may call, in OpenAI's format.
            tool_choice: OpenAI's `tool_choice`.
            extra_body: any other member of the OpenAI request body.
            client_request_id: the caller's own id, echoed in the result.
            disable_reuse: recompute everything and leave retained KV alone.
            timeout_seconds: deadline of the whole turn; none by default.
            **sampling: `max_tokens`, `temperature` and the other fields of
                `Sampling`.

        Raises:
            InvalidFieldError: an argument has the wrong type.
            TypeError: a keyword is no sampling parameter.
        """
        request = chat_request(
            messages,
            sampling,
            model=model,
            conversation_id=conversation_id,
            tools=tools,
            tool_choice=tool_choice,
            extra_body=extra_body,
            client_request_id=client_request_id,
            disable_reuse=disable_reuse,
        )
        return Answer(
            self._stub.Chat(
                request, timeout=timeout_seconds, metadata=(*self._metadata, *trace_context())
            )
        )

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        model: str,
        conversation_id: str = "",
        extra_body: Mapping[str, Any] | None = None,
        client_request_id: str = "",
        disable_reuse: bool = False,
        timeout_seconds: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> Answer:
        """Run one completion turn.

        Args:
            prompt: the whole prompt, earlier turns included, as text or as
                token ids.
            model, conversation_id, extra_body, client_request_id, disable_reuse,
                timeout_seconds, **sampling: as for `chat`.

        Raises:
            InvalidFieldError: an argument has the wrong type.
            TypeError: a keyword is no sampling parameter.
        """
        request = generate_request(
            prompt,
            sampling,
            model=model,
            conversation_id=conversation_id,
            extra_body=extra_body,
            client_request_id=client_request_id,
            disable_reuse=disable_reuse,
        )
        return Answer(
            self._stub.Generate(
                request, timeout=timeout_seconds, metadata=(*self._metadata, *trace_context())
            )
        )

    def end_conversation(self, conversation_id: str, *, model: str) -> EndedConversation:
        """Say that no further turn will come, so that retained KV can go."""
        request = router_pb2.EndConversationRequest(model=model, conversation_id=conversation_id)
        with rpc.typed_errors():
            response = self._stub.EndConversation(
                request, timeout=UNARY_TIMEOUT_SECONDS, metadata=self._metadata
            )
        return EndedConversation(found=response.found, released=response.released)

    def models(self) -> list[ModelInfo]:
        """Models that can be served now, sorted by name."""
        with rpc.typed_errors():
            return parse_models(
                self._stub.ListModels(
                    router_pb2.ListModelsRequest(),
                    timeout=UNARY_TIMEOUT_SECONDS,
                    metadata=self._metadata,
                )
            )

    def explain_route(self, *, model: str, conversation_id: str = "") -> Route:
        """Where a turn would go now and whether it could reuse KV. Changes nothing."""
        request = router_pb2.ExplainRouteRequest(model=model, conversation_id=conversation_id)
        with rpc.typed_errors():
            return parse_route(
                self._stub.ExplainRoute(
                    request, timeout=UNARY_TIMEOUT_SECONDS, metadata=self._metadata
                )
            )

    def close(self) -> None:
        """Close the connection; running calls are cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
