"""Ends conversations over HTTP: the memory that they hold on decode is freed at once."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvloop.errors import KvloopError
from services.router.gateway import http
from services.router.identity import conversation_key
from services.router.ledger import Ledger
from services.router.reception import Reception
from services.router.request import check_conversation_id, check_model
from services.router.workers import WorkerPool


class ConversationPages:
    """DELETE /v1/conversations/{id}, as OpenAI clients call it.

    Args:
        reception: knows callers.
        pool: the live workers, for the names of models.
        ledger: where conversations end.
        timeout_seconds: how long the ledger may take.
    """

    def __init__(
        self, reception: Reception, pool: WorkerPool, ledger: Ledger, *, timeout_seconds: float
    ) -> None:
        self._reception = reception
        self._pool = pool
        self._ledger = ledger
        self._timeout_seconds = timeout_seconds

    def routes(self) -> list[Route]:
        """Where it lies."""
        return [Route("/v1/conversations/{conversation_id:path}", self.end, methods=["DELETE"])]

    async def end(self, request: Request) -> Response:
        """End the conversation: of the model that the query names, or of every model.

        An unknown one is an answer, `"deleted": false`, so the call may be repeated.
        """
        conversation_id = request.path_params["conversation_id"]
        try:
            caller = self._reception.caller(request.headers.get("authorization"))
            check_conversation_id(conversation_id, required=True)
            models = (
                [request.query_params["model"]]
                if "model" in request.query_params
                else [model.name for model in self._pool.models()]
            )
            for model in models:
                check_model(model)
            endings = await asyncio.gather(
                *(
                    self._ledger.release(
                        conversation_key(caller.tenant, model, conversation_id),
                        timeout_seconds=self._timeout_seconds,
                    )
                    for model in models
                )
            )
        except KvloopError as error:
            return http.error_response(error)
        body = {
            "id": conversation_id,
            "object": "conversation.deleted",
            "deleted": any(ending.found for ending in endings),
        }
        return Response(msgspec.json.encode(body), media_type=http.JSON)
