"""Reading requests and writing replies over ASGI."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Send

from kvloop.errors import KvloopError
from services.router.gateway.errors import ErrorReply, TooLargeError, TooSlowError, to_reply

JSON = "application/json"
EVENT_STREAM = "text/event-stream; charset=utf-8"


@dataclass(frozen=True)
class BodyLimits:
    """What the body of a request may be."""

    max_bytes: int
    """Largest body."""
    seconds: float
    """How long a small one may take."""
    bytes_per_second: float
    """Each time that so many bytes have come, a body may take a second more."""


async def read_body(request: Request, limits: BodyLimits) -> bytes:
    """The whole body.

    Raises:
        TooLargeError: it has more bytes than allowed; the rest is not read.
        TooSlowError: it takes longer than allowed; the rest is not read.
        ClientDisconnect: the client hung up.
    """
    too_large = TooLargeError(f"the request's body has more than {limits.max_bytes} bytes")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limits.max_bytes:
        raise too_large
    started = asyncio.get_running_loop().time()
    pieces: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout_at(started + limits.seconds) as patience:
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                pieces.append(message.get("body", b""))
                size += len(pieces[-1])
                if size > limits.max_bytes:
                    raise too_large
                if not message.get("more_body", False):
                    return b"".join(pieces)
                patience.reschedule(started + limits.seconds + size / limits.bytes_per_second)
    except TimeoutError:
        raise TooSlowError(f"the request's body comes too slowly: {size} bytes so far") from None


async def start(send: Send, status: int, content_type: str, headers: Mapping[str, str]) -> None:
    """Send the head of a reply."""
    named = {"content-type": content_type, **headers}
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(k.encode("latin-1"), v.encode("latin-1")) for k, v in named.items()],
        }
    )


async def write(send: Send, data: bytes, *, more: bool) -> None:
    """Send a part of the body at once. Waits while the client reads too slowly."""
    await send({"type": "http.response.body", "body": data, "more_body": more})


async def reply(
    send: Send,
    status: int,
    body: bytes,
    headers: Mapping[str, str],
    *,
    content_type: str = JSON,
) -> None:
    """Send a reply in one piece."""
    await start(send, status, content_type, {"content-length": str(len(body)), **headers})
    await write(send, body, more=False)


async def reply_error(send: Send, error: ErrorReply, headers: Mapping[str, str]) -> None:
    """Send an error in place of an answer."""
    await reply(send, error.status, error.body, {**error.headers, **headers})


def error_response(error: KvloopError | ErrorReply) -> Response:
    """What a page answers in place of its content."""
    found = error if isinstance(error, ErrorReply) else to_reply(error)
    return Response(found.body, found.status, found.headers, media_type=JSON)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`, and cancel it when the client hangs up.

    Args:
        receive: of the request, whose body has been read.
        work: sends the reply.
    """
    async with asyncio.TaskGroup() as tasks:
        working = tasks.create_task(work, name="answer")
        watching = tasks.create_task(_cancel_at_end(receive, working), name="watch client")
        working.add_done_callback(lambda _: watching.cancel())


async def _cancel_at_end(receive: Receive, working: asyncio.Task[None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    working.cancel()
