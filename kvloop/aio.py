"""The asynchronous client; what each method does is told in kvloop.client."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, Unpack

from kvloop import rpc
from kvloop.chunks import Chunk
from kvloop.client import DEFAULT_ROUTER, UNARY_TIMEOUT_SECONDS, key_from_environment
from kvloop.completions import Assembler, Completion
from kvloop.messages import Message
from kvloop.requests import Sampling, chat_request, generate_request
from kvloop.router.v1 import router_pb2, router_pb2_grpc
from kvloop.routes import EndedConversation, ModelInfo, Route, parse_models, parse_route
from kvloop.tls import TlsSource
from kvloop.trace_context import trace_context

if TYPE_CHECKING:
    Event = router_pb2.ChatResponse | router_pb2.GenerateResponse

    class _Call(Protocol):
        """A running call: its events, and a way to stop it."""

        def __aiter__(self) -> AsyncIterator[Event]: ...
        def cancel(self) -> Any: ...


class AsyncAnswer(AsyncIterator[Chunk]):
    """An answer that is being generated. Made by `AsyncClient.chat` and `generate`.

    Iterate to get chunks as the engine writes them, or await `collect()` for the
    whole. Leaving the `async with` block, `close()`, and cancelling the task that
    iterates cancel a call that is still running; both engines then stop working
    on it.

        async with client.chat(messages, model="tiny") as answer:
            async for chunk in answer:
                print(chunk.text, end="")
        print((await answer.collect()).receipt)
    """

    def __init__(self, call: _Call) -> None:
        self._call = call
        self._events = aiter(call)
        self._assembler = Assembler()
        self._ready: deque[Chunk] = deque()
        self._closed = False
        self._ended = False

    async def __anext__(self) -> Chunk:
        if self._ready:
            return self._ready.popleft()
        if self._closed or self._ended:
            raise StopAsyncIteration
        try:
            with rpc.typed_errors():
                async for event in self._events:
                    self._ready.extend(self._assembler.add(event))
                    if self._ready:
                        return self._ready.popleft()
        except BaseException:  # cancellation included: leave no engine working for nobody
            self.close()
            raise
        self._ended = True
        self._assembler.finished()
        raise StopAsyncIteration

    async def collect(self) -> Completion:
        """The whole answer; waits for what has not come yet.

        Raises:
            KvloopError: the turn failed.
            RuntimeError: the answer was closed before its end.
        """
        async for _ in self:
            pass
        if self._closed and self._assembler.completion is None:
            raise RuntimeError("the answer was closed before its end")
        return self._assembler.finished()

    def close(self) -> None:
        """Stop the call. Harmless when it has ended."""
        self._closed = True
        self._ready.clear()
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class AsyncClient:
    """Talks to a kvloop router; the asynchronous twin of `Client`.

    Make it inside a running event loop.

        async with AsyncClient("127.0.0.1:7100") as client:
            done = await client.chat(history, model="tiny", conversation_id="c1").collect()

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
        self._channel = rpc.make_aio_channel(router, tls)
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
    ) -> AsyncAnswer:
        """Run one chat turn; arguments and errors as for `Client.chat`."""
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
        return AsyncAnswer(
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
    ) -> AsyncAnswer:
        """Run one completion turn; arguments and errors as for `Client.generate`."""
        request = generate_request(
            prompt,
            sampling,
            model=model,
            conversation_id=conversation_id,
            extra_body=extra_body,
            client_request_id=client_request_id,
            disable_reuse=disable_reuse,
        )
        return AsyncAnswer(
            self._stub.Generate(
                request, timeout=timeout_seconds, metadata=(*self._metadata, *trace_context())
            )
        )

    async def end_conversation(self, conversation_id: str, *, model: str) -> EndedConversation:
        """Say that no further turn will come, so that retained KV can go."""
        request = router_pb2.EndConversationRequest(model=model, conversation_id=conversation_id)
        with rpc.typed_errors():
            response = await self._stub.EndConversation(
                request, timeout=UNARY_TIMEOUT_SECONDS, metadata=self._metadata
            )
        return EndedConversation(found=response.found, released=response.released)

    async def models(self) -> list[ModelInfo]:
        """Models that can be served now, sorted by name."""
        with rpc.typed_errors():
            return parse_models(
                await self._stub.ListModels(
                    router_pb2.ListModelsRequest(),
                    timeout=UNARY_TIMEOUT_SECONDS,
                    metadata=self._metadata,
                )
            )

    async def explain_route(self, *, model: str, conversation_id: str = "") -> Route:
        """Where a turn would go now and whether it could reuse KV. Changes nothing."""
        request = router_pb2.ExplainRouteRequest(model=model, conversation_id=conversation_id)
        with rpc.typed_errors():
            return parse_route(
                await self._stub.ExplainRoute(
                    request, timeout=UNARY_TIMEOUT_SECONDS, metadata=self._metadata
                )
            )

    async def close(self) -> None:
        """Close the connection; running calls are cancelled."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()
