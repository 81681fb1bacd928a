"""The gRPC edge: convert, call, convert back."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, TypeVar

import grpc

from kvloop.errors import InvalidFieldError
from kvloop.router.v1 import router_pb2, router_pb2_grpc
from services.router.deadline import Clock, Deadline
from services.router.explain import Explainer
from services.router.identity import conversation_key
from services.router.ledger import Ledger
from services.router.length import context_limit
from services.router.metrics import Outcome, RouterMetrics
from services.router.request import (
    TurnRequest,
    chat_turn,
    check_conversation_id,
    check_model,
    generate_turn,
)
from services.router.settings import RouterSettings
from services.router.turn import TurnPipeline
from services.router.workers import WorkerPool

_Request = TypeVar("_Request")
_Context = grpc.aio.ServicerContext[Any, Any]


class RouterService(router_pb2_grpc.RouterServiceServicer):
    """RouterService over the domain objects given."""

    def __init__(
        self,
        *,
        pipeline: TurnPipeline,
        explainer: Explainer,
        pool: WorkerPool,
        ledger: Ledger,
        metrics: RouterMetrics,
        clock: Clock,
        settings: RouterSettings,
    ) -> None:
        self._pipeline = pipeline
        self._explainer = explainer
        self._pool = pool
        self._ledger = ledger
        self._metrics = metrics
        self._clock = clock
        self._settings = settings

    async def Chat(
        self, request: router_pb2.ChatRequest, context: _Context
    ) -> AsyncIterator[router_pb2.ChatResponse]:
        """Run one chat turn."""
        async with aclosing(self._run(chat_turn, request, context)) as events:
            async for event in events:
                if isinstance(event, bytes):
                    yield router_pb2.ChatResponse(chunk=router_pb2.Chunk(json=event))
                else:
                    yield router_pb2.ChatResponse(result=event)

    async def Generate(
        self, request: router_pb2.GenerateRequest, context: _Context
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        """Run one completion turn."""
        async with aclosing(self._run(generate_turn, request, context)) as events:
            async for event in events:
                if isinstance(event, bytes):
                    yield router_pb2.GenerateResponse(chunk=router_pb2.Chunk(json=event))
                else:
                    yield router_pb2.GenerateResponse(result=event)

    async def EndConversation(
        self, request: router_pb2.EndConversationRequest, context: _Context
    ) -> router_pb2.EndConversationResponse:
        """End a conversation at the ledger."""
        check_model(request.model)
        check_conversation_id(request.conversation_id, required=True)
        ending = await self._ledger.release(
            conversation_key(request.model, request.conversation_id),
            timeout_seconds=self._deadline(context).hop_timeout(
                self._settings.ledger_call_timeout_seconds
            ),
        )
        return router_pb2.EndConversationResponse(found=ending.found, released=ending.released)

    async def ListModels(
        self, request: router_pb2.ListModelsRequest, context: _Context
    ) -> router_pb2.ListModelsResponse:
        """List the models with workers for both legs."""
        return router_pb2.ListModelsResponse(
            models=[
                router_pb2.Model(
                    name=model.name,
                    max_model_len=context_limit([*model.prefill, *model.decode]),
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
        check_model(request.model)
        check_conversation_id(request.conversation_id, required=False)
        return await self._explainer.explain(request.model, request.conversation_id)

    def _run(
        self, convert: Callable[[_Request], TurnRequest], request: _Request, context: _Context
    ) -> AsyncGenerator[bytes | router_pb2.TurnResult, None]:
        try:
            turn = convert(request)
        except InvalidFieldError:
            self._metrics.turn_ended(Outcome.REJECTED)
            raise
        return self._pipeline.run(turn, self._deadline(context))

    def _deadline(self, context: _Context) -> Deadline:
        remaining = context.time_remaining()
        limit = self._settings.max_turn_seconds
        seconds = limit if remaining is None else min(remaining, limit)
        return Deadline(
            self._clock() + seconds, self._clock, self._settings.deadline_margin_seconds
        )
