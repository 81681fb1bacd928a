"""The process's own HTTP surface: its engines, also those that are down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.sim.host import EngineHost

_ACTIONS = ("start", "restart", "exit", "refuse")


class _Order(msgspec.Struct):
    action: str
    seconds: float = 0.0


def admin_app(hosts: Sequence[EngineHost]) -> Starlette:
    """The ASGI application.

    GET /engines lists them; POST /engines/{index} takes {"action": ...,
    "seconds": ...} with start, restart, exit or refuse.

    Args:
        hosts: the process's engines, by index.
    """

    async def list_engines(request: Request) -> Response:
        return _json([_describe(host) for host in hosts])

    async def order(request: Request) -> Response:
        index = request.path_params["index"]
        if index >= len(hosts):
            return _json({"error": f"there is no engine {index}"}, 404)
        try:
            wanted = msgspec.json.decode(await request.body(), type=_Order)
        except msgspec.DecodeError as error:
            return _json({"error": str(error)}, 400)
        host = hosts[index]
        match wanted.action:
            case "start":
                host.start()
            case "restart":
                host.restart(wanted.seconds)
            case "exit":
                host.exit()
            case "refuse":
                host.refuse(wanted.seconds)
            case _:
                return _json({"error": f"action must be one of {', '.join(_ACTIONS)}"}, 400)
        return _json(_describe(host))

    return Starlette(
        routes=[
            Route("/engines", list_engines),
            Route("/engines/{index:int}", order, methods=["POST"]),
        ]
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


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
