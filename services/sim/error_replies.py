"""Starlette handlers that reply to errors as vLLM does."""

from __future__ import annotations

from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from services.sim.api_errors import ApiError


async def api_error(request: Request, error: Exception) -> Response:
    """Reply to an ApiError."""
    assert isinstance(error, ApiError)
    return _reply(error)


async def http_error(request: Request, error: Exception) -> Response:
    """Reply to what the framework refuses, such as an unknown path."""
    assert isinstance(error, HTTPException)
    phrase = HTTPStatus(error.status_code).phrase
    return _reply(ApiError(error.detail, status=error.status_code, type=phrase))


def _reply(error: ApiError) -> Response:
    return Response(error.to_json(), error.status, media_type="application/json")
