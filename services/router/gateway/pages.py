"""Everything of the HTTP surface that is not a turn."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from kvloop.errors import KvloopError, NotFoundError
from kvloop.worker.v1 import worker_pb2
from services.router.body import decode, parse_object
from services.router.gateway import http
from services.router.gateway.errors import ErrorReply, error_body
from services.router.openai_fields import refuse_reserved
from services.router.reception import Reception
from services.router.routing import Routes
from services.router.turn import admit
from services.router.workers import WorkerPool

_Page = Callable[["Pages", Request], Awaitable[Response]]
_OPTIONAL_STRING = msgspec.json.Decoder(str | None)


def _with_errors(page: _Page) -> _Page:
    """Answer with an OpenAI error what the page raises."""

    @wraps(page)
    async def answered(self: Pages, request: Request) -> Response:
        try:
            return await page(self, request)
        except KvloopError as error:
            return http.error_response(error)
        except ClientDisconnect:
            return Response(status_code=400)  # which nobody reads

    return answered


class Pages:
    """Models, tokens, health and metrics.

    Args:
        reception: knows callers.
        pool: the live workers.
        routes: chooses among them.
        registry: the router's counters; asked from a thread.
        ready: whether turns can be served now.
        started_at: seconds since the epoch; `created` of every model.
        body_limits: of requests.
        connect_timeout_seconds: how long to wait for a connection to a worker.
        timeout_seconds: how long a worker may take to tokenize.
    """

    def __init__(
        self,
        *,
        reception: Reception,
        pool: WorkerPool,
        routes: Routes,
        registry: CollectorRegistry,
        ready: Callable[[], bool],
        started_at: int,
        body_limits: http.BodyLimits,
        connect_timeout_seconds: float,
        timeout_seconds: float,
    ) -> None:
        self._reception = reception
        self._pool = pool
        self._routes = routes
        self._registry = registry
        self._ready = ready
        self._started_at = started_at
        self._body_limits = body_limits
        self._connect_timeout_seconds = connect_timeout_seconds
        self._timeout_seconds = timeout_seconds

    @_with_errors
    async def models(self, request: Request) -> Response:
        """GET /v1/models: what can be served now."""
        self._caller(request)
        listed = [
            {
                "id": model.name,
                "object": "model",
                "created": self._started_at,
                "owned_by": "vllm",
                "root": model.name,
                "parent": None,
                "max_model_len": model.context_limit or None,
            }
            for model in self._pool.models()
            if model.decode
        ]
        return Response(
            msgspec.json.encode({"object": "list", "data": listed}), media_type=http.JSON
        )

    @_with_errors
    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize: the engine's own reply."""
        self._caller(request)
        body = await http.read_body(request, self._body_limits)
        members = parse_object(body, "body")
        for name in members:
            refuse_reserved(name, name)
        model = decode(members.get("model", msgspec.Raw(b"null")), _OPTIONAL_STRING, "model")
        worker_id = self._tokenizer(model)
        asked = worker_pb2.TokenizeRequest(body_json=body)
        with self._pool.use(worker_id, is_leg=False) as client:
            await client.connect(timeout_seconds=self._connect_timeout_seconds)
            found = await client.tokenize(asked, timeout_seconds=self._timeout_seconds)
        return Response(found.reply_json, media_type=http.JSON)

    @_with_errors
    async def kept_response(self, request: Request) -> Response:
        """/v1/responses/{id} and below: answers are kept nowhere."""
        self._caller(request)
        raise NotFoundError(
            "there is no such response: kvloop keeps none, since any engine answers any turn"
        )

    async def live(self, request: Request) -> Response:
        """GET /health/live: the process runs."""
        return Response()

    async def ready(self, request: Request) -> Response:
        """GET /health and /health/ready: a turn can be served now."""
        return Response(status_code=200 if self._ready() else 503)

    async def metrics(self, request: Request) -> Response:
        """GET /metrics."""
        shown = await asyncio.to_thread(generate_latest, self._registry)
        return Response(shown, headers={"content-type": CONTENT_TYPE_LATEST})

    def _caller(self, request: Request) -> None:
        self._reception.caller(request.headers.get("authorization"))

    def _tokenizer(self, model: str | None) -> str:
        known = self._pool.models()
        if model is None and len(known) == 1:
            model = known[0].name  # as an engine does that serves one model
        found = admit(model or "", known)
        return self._routes.decode(found.name).worker_id


async def http_error(request: Request, error: Exception) -> Response:
    """A path or method that is not served."""
    assert isinstance(error, HTTPException)
    body = error_body(error.status_code, error.detail)
    return http.error_response(ErrorReply(error.status_code, body, dict(error.headers or {})))
