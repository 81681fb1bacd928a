"""The gRPC edge: convert, call, convert back."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import grpc

from kvloop.errors import ENGINE_BODY, InvalidFieldError, KvloopError
from kvloop.router.v1 import router_pb2, router_pb2_grpc
from services.common.tracing import carried
from services.router.explain import Explainer
from services.router.identity import Caller, conversation_key
from services.router.ledger import Ledger
from services.router.reception import Reception
from services.router.request import (
    TurnRequest,
    chat_turn,
    check_conversation_id,
    check_model,
    generate_turn,
)
from services.router.turn import AnswerEnd
from services.router.workers import WorkerPool

_Request = TypeVar("_Request")
_Context = grpc.aio.ServicerContext[Any, Any]
_Parts = dict[str, Any]
"""The field of a response that is set, which ChatResponse and GenerateResponse have alike."""


class RouterService(router_pb2_grpc.RouterServiceServicer):
    """RouterService over the domain objects given."""

    def __init__(
        self,
        *,
        reception: Reception,
        explainer: Explainer,
        pool: WorkerPool,
        ledger: Ledger,
        ledger_timeout_seconds: float,
    ) -> None:
        self._reception = reception
        self._explainer = explainer
        self._pool = pool
        self._ledger = ledger
        self._ledger_timeout_seconds = ledger_timeout_seconds

    async def Chat(
        self, request: router_pb2.ChatRequest, context: _Context
    ) -> AsyncIterator[router_pb2.ChatResponse]:
        """Run one chat turn."""
        async with aclosing(self._run(chat_turn, request, context)) as events:
            async for event in events:
                for parts in _messages(event, batches=request.accept_batches):
                    yield router_pb2.ChatResponse(**parts)

    async def Generate(
        self, request: router_pb2.GenerateRequest, context: _Context
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        """Run one completion turn."""
        async with aclosing(self._run(generate_turn, request, context)) as events:
            async for event in events:
                for parts in _messages(event, batches=request.accept_batches):
                    yield router_pb2.GenerateResponse(**parts)

    async def EndConversation(
        self, request: router_pb2.EndConversationRequest, context: _Context
    ) -> router_pb2.EndConversationResponse:
        """End a conversation at the ledger."""
        caller = self._caller(context)
        check_model(request.model)
        check_conversation_id(request.conversation_id, required=True)
        deadline = self._reception.deadline(context.time_remaining())
        ending = await self._ledger.release(
            conversation_key(caller.tenant, request.model, request.conversation_id),
            timeout_seconds=deadline.hop_timeout(self._ledger_timeout_seconds),
        )
        return router_pb2.EndConversationResponse(found=ending.found, released=ending.released)

    async def ListModels(
        self, request: router_pb2.ListModelsRequest, context: _Context
    ) -> router_pb2.ListModelsResponse:
        """List the models with workers for both legs."""
        self._caller(context)
        return router_pb2.ListModelsResponse(
            models=[
                router_pb2.Model(
                    name=model.name,
                    max_model_len=model.context_limit,
                    prefill_workers=len(model.prefill),
                    decode_workers=len(model.decode),
                )
                for model in self._pool.models()
                if model.prefill and model.decode
            ]
        )

    async def ExplainRoute(
        self, request: router_pb2.ExplainRouteRequest, context: _Context
    ) -> router_pb2.ExplainRouteResponse:
        """Explain a route without taking it."""
        caller = self._caller(context)
        check_model(request.model)
        check_conversation_id(request.conversation_id, required=False)
        return await self._explainer.explain(caller.tenant, request.model, request.conversation_id)

    async def _run(
        self,
        convert: Callable[[_Request, Caller], TurnRequest],
        request: _Request,
        context: _Context,
    ) -> AsyncGenerator[Sequence[bytes] | AnswerEnd, None]:
        caller = self._caller(context)
        try:
            turn = convert(request, caller)
        except InvalidFieldError:
            self._reception.refused()
            raise
        deadline = self._reception.deadline(context.time_remaining())
        try:
            trace = carried(context.invocation_metadata() or ())
            running = self._reception.run(turn, deadline, trace_headers=trace)
            async with aclosing(running) as events:
                async for event in events:
                    yield event
        except KvloopError as error:
            # Too large for the trailers that other clients than ours accept.
            error.metadata.pop(ENGINE_BODY, None)
            raise

    def _caller(self, context: _Context) -> Caller:
        """Who is asking, by the metadata key `authorization`."""
        for name, value in context.invocation_metadata() or ():
            if name == "authorization":
                return self._reception.caller(value if isinstance(value, str) else None)
        return self._reception.caller(None)


def _messages(event: Sequence[bytes] | AnswerEnd, *, batches: bool) -> Iterator[_Parts]:
    """The one field of each message for what a turn gave; with batches it is one message."""
    result = event.result if isinstance(event, AnswerEnd) else None
    chunks = event.chunks if isinstance(event, AnswerEnd) else event
    if batches and (len(chunks) > 1 or (chunks and result)):
        yield {"batch": router_pb2.ChunkBatch(chunks_json=chunks, result=result)}
        return
    for chunk in chunks:
        yield {"chunk": router_pb2.Chunk(json=chunk)}
    if result is not None:
        yield {"result": result}
