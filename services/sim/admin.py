"""The process's own HTTP surface: its engines, also those that are down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.sim.api_errors import ApiError
from services.sim.control import carry_out, read_order
from services.sim.error_replies import api_error, http_error
from services.sim.host import EngineHost


def admin_app(hosts: Sequence[EngineHost]) -> Starlette:
    """The ASGI application.

    GET /engines lists the engines; POST /engines/{index} takes an order such as
    {"action": "start"}.

    Args:
        hosts: the process's engines, by index.
    """

    async def list_engines(request: Request) -> Response:
        return _json([_describe(host) for host in hosts])

    async def order(request: Request) -> Response:
        index = request.path_params["index"]
        if index >= len(hosts):
            raise HTTPException(404, f"there is no engine {index}")
        carry_out(read_order(await request.body()), hosts[index])
        return _json(_describe(hosts[index]))

    return Starlette(
        routes=[
            Route("/engines", list_engines),
            Route("/engines/{index:int}", order, methods=["POST"]),
        ],
        exception_handlers={ApiError: api_error, HTTPException: http_error},
    )


def _describe(host: EngineHost) -> dict[str, Any]:
    identity = host.identity
    return {
        "index": host.spec.index,
        "state": str(host.state),
        "port": host.spec.port,
        "side_channel_port": host.spec.side_channel_port,
        "engine_id": identity.engine_id if identity else None,
        "epoch": identity.epoch if identity else None,
    }


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
