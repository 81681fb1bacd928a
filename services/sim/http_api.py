"""The engine's HTTP surface: vLLM's endpoints, and /sim for those who test."""

from __future__ import annotations

from typing import Any

import msgspec
import structlog
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.sim import chat_template, metrics
from services.sim.api_errors import ApiError, internal_error, model_not_found
from services.sim.api_requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse,
)
from services.sim.control import Order, carry_out, read_order
from services.sim.error_replies import api_error, http_error
from services.sim.faults import Fault, FaultBook
from services.sim.generate import GenerateEndpoint, GenerateParts
from services.sim.state import engine_state, standing_json
from services.sim.tokenizer import Tokenizer, token_text

_log = structlog.get_logger(__name__)


class EngineApi:
    """The routes of one engine that do not generate.

    Args:
        parts: the engine.
        tokenizer: of its model.
        faults: its faults.
    """

    def __init__(self, parts: GenerateParts, tokenizer: Tokenizer, faults: FaultBook) -> None:
        self._parts = parts
        self._core = parts.core
        self._tokenizer = tokenizer
        self._faults = faults

    def app(self) -> Starlette:
        """The ASGI application."""
        chat = GenerateEndpoint(self._parts, ChatRequest)
        completion = GenerateEndpoint(self._parts, CompletionRequest)
        return Starlette(
            routes=[
                Route("/health", self._ok),
                Route("/ping", self._ok, methods=["GET", "POST"]),
                Route("/version", self._version),
                Route("/metrics", self._metrics),
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", chat, methods=["POST"]),
                Route("/v1/completions", completion, methods=["POST"]),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/detokenize", self._detokenize, methods=["POST"]),
                Route("/reset_prefix_cache", self._reset_prefix_cache, methods=["POST"]),
                Route("/sim/state", self._state),
                Route("/sim/engine", self._order, methods=["POST"]),
                Route("/sim/faults", self._list_faults, methods=["GET"]),
                Route("/sim/faults", self._add_faults, methods=["POST"]),
                Route("/sim/faults", self._clear_faults, methods=["DELETE"]),
                Route("/sim/faults/{id:int}", self._remove_fault, methods=["DELETE"]),
            ],
            exception_handlers={
                ApiError: api_error,
                HTTPException: http_error,
                Exception: _defect,
            },
        )

    async def _ok(self, request: Request) -> Response:
        return Response()

    async def _version(self, request: Request) -> Response:
        return _json({"version": self._core.spec.version_text})

    async def _metrics(self, request: Request) -> Response:
        return Response(metrics.render(self._core), media_type=metrics.CONTENT_TYPE)

    async def _models(self, request: Request) -> Response:
        spec = self._core.spec
        created = int(self._parts.wall_clock())
        card = {
            "id": spec.model,
            "object": "model",
            "created": created,
            "owned_by": "vllm",
            "root": spec.model,
            "parent": None,
            "max_model_len": spec.max_model_len,
            "permission": [],
        }
        return _json({"object": "list", "data": [card]})

    async def _tokenize(self, request: Request) -> Response:
        body = parse(await request.body(), TokenizeRequest)
        spec = self._core.spec
        if body.model and body.model != spec.model:
            raise model_not_found(body.model, spec.model)
        if body.messages is not None:
            text = chat_template.render(
                body.messages,
                body.tools,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
            )
        elif body.prompt is not None:
            text = body.prompt
        else:
            raise ApiError("either prompt or messages must be given", param="prompt")
        tokens = self._tokenizer.encode(text)
        return _json(
            {
                "count": len(tokens),
                "max_model_len": spec.max_model_len,
                "tokens": tokens,
                "token_strs": [token_text(token) for token in tokens]
                if body.return_token_strs
                else None,
            }
        )

    async def _detokenize(self, request: Request) -> Response:
        body = parse(await request.body(), DetokenizeRequest)
        return _json({"prompt": self._tokenizer.decode(body.tokens, skip_special=False)})

    async def _reset_prefix_cache(self, request: Request) -> Response:
        return _json({"success": self._core.reset_prefix_cache()})

    async def _state(self, request: Request) -> Response:
        with_blocks = request.query_params.get("blocks") in ("1", "true")
        return _json(engine_state(self._core, self._faults, with_blocks=with_blocks))

    async def _order(self, request: Request) -> Response:
        order = read_order(await request.body())
        # After the reply is sent: some orders cut its connection.
        return _json({}, then=BackgroundTask(self._carry_out, order))

    async def _carry_out(self, order: Order) -> None:
        carry_out(order, self._parts.control)

    async def _list_faults(self, request: Request) -> Response:
        return _json([standing_json(standing) for standing in self._faults.all()])

    async def _add_faults(self, request: Request) -> Response:
        body = await request.body()
        if body.lstrip().startswith(b"["):
            faults = _decode(body, list[Fault])
        else:
            faults = [_decode(body, Fault)]
        return _json([standing_json(self._faults.add(fault)) for fault in faults])

    async def _clear_faults(self, request: Request) -> Response:
        self._faults.clear()
        return _json([])

    async def _remove_fault(self, request: Request) -> Response:
        if not self._faults.remove(request.path_params["id"]):
            raise HTTPException(404)
        return _json({})


def _decode(body: bytes, type: Any) -> Any:
    try:
        return msgspec.json.decode(body, type=type)
    except msgspec.DecodeError as error:
        raise ApiError(str(error)) from error


def _json(content: object, *, then: BackgroundTask | None = None) -> Response:
    body = msgspec.json.encode(content)
    return Response(body, media_type="application/json", background=then)


async def _defect(request: Request, error: Exception) -> Response:
    _log.exception("request_failed", path=request.url.path, exc_info=error)
    return Response(internal_error().to_json(), 500, media_type="application/json")
