"""POST /v1/chat/completions, /v1/completions and /v1/responses."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing

import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from kvloop.common.v1 import common_pb2
from kvloop.errors import InternalError, InvalidFieldError, KvloopError
from kvloop.router.v1 import router_pb2
from services.common.tracing import carried
from services.router.gateway import http, sse
from services.router.gateway.errors import to_reply
from services.router.gateway.requests import ReadingRules, read_request
from services.router.reception import Reception
from services.router.request import TurnRequest
from services.router.turn import AnswerEnd

_log = structlog.get_logger(__name__)
_MAX_ECHOED_ID = 256
_MISS_PREFIX = "MISS_REASON_"

Events = AsyncGenerator[Sequence[bytes] | AnswerEnd, None]


class TurnEndpoint:
    """Answers turns over HTTP, as an ASGI application.

    Args:
        api: format of the bodies.
        reception: admits turns.
        rules: how requests are read.
        body_limits: of requests.
    """

    def __init__(
        self,
        api: common_pb2.Api.ValueType,
        reception: Reception,
        rules: ReadingRules,
        *,
        body_limits: http.BodyLimits,
    ) -> None:
        self._api = api
        self._reception = reception
        self._rules = rules
        self._body_limits = body_limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive)
        headers = _echo(request.headers.get("x-request-id", ""))
        deadline = self._reception.deadline()
        try:
            caller = self._reception.caller(request.headers.get("authorization"))
            body = await http.read_body(request, self._body_limits)
            turn = read_request(self._api, body, request.headers, caller, self._rules)
        except InvalidFieldError as error:
            self._reception.refused()
            return await http.reply_error(send, to_reply(error), headers)
        except KvloopError as error:
            return await http.reply_error(send, to_reply(error), headers)
        except ClientDisconnect:
            return
        turn_id = self._reception.new_turn_id()
        headers |= _echo(turn.client_request_id)
        headers["x-kvloop-turn-id"] = turn_id
        events = self._reception.run(turn, deadline, turn_id, carried(request.headers.items()))
        await http.while_connected(receive, self._answer(turn, events, headers, send))

    async def _answer(
        self,
        turn: TurnRequest,
        events: Events,
        headers: Mapping[str, str],
        send: Send,
    ) -> None:
        async with aclosing(events):
            if turn.whole:
                await relay_whole(events, send, headers)
            else:
                await relay_stream(events, send, headers, _framing(turn.api))


async def relay_stream(
    events: Events, send: Send, headers: Mapping[str, str], framing: sse.Framing
) -> None:
    """Send every chunk as soon as it is there, those that arrived together at once.

    An error before the first chunk is a reply of its own; after it, an event, as
    vLLM writes it.
    """
    started = False
    last: Sequence[bytes] = ()
    try:
        async for event in events:
            if isinstance(event, AnswerEnd):
                last = event.chunks
                continue
            if not started:
                await _start_stream(send, headers)
                started = True
            await http.write(send, b"".join(map(framing.event, event)), more=True)
    except Exception as error:
        found = to_reply(_typed(error))
        if not started:
            return await http.reply_error(send, found, headers)
        await http.write(send, framing.error(found.body), more=True)
    if not started:
        await _start_stream(send, headers)
    await http.write(send, b"".join((*map(framing.event, last), framing.end())), more=False)


async def relay_whole(events: Events, send: Send, headers: Mapping[str, str]) -> None:
    """Send the reply with a summary of the receipt in its headers."""
    body = b""
    summary: dict[str, str] = {}
    try:
        async for event in events:
            if isinstance(event, AnswerEnd):
                summary = receipt_headers(event.result.receipt)
            chunks = event.chunks if isinstance(event, AnswerEnd) else event
            body = chunks[-1] if chunks else body
    except Exception as error:
        return await http.reply_error(send, to_reply(_typed(error)), headers)
    await http.reply(send, 200, body, {**headers, **summary})


def receipt_headers(receipt: router_pb2.Receipt) -> dict[str, str]:
    """The receipt, in short."""
    reason = common_pb2.MissReason.Name(receipt.miss_reason).removeprefix(_MISS_PREFIX)
    report = receipt.prefill
    summary = {
        "x-kvloop-turn": receipt.turn,
        "x-kvloop-handle-hit": str(receipt.handle_hit).lower(),
        "x-kvloop-pulled-tokens": report.pulled_tokens,
        "x-kvloop-cached-tokens": report.cached_tokens,
        "x-kvloop-recomputed-tokens": report.recomputed_tokens,
        "x-kvloop-retained-tokens": receipt.retained_tokens,
    }
    if receipt.miss_reason != common_pb2.MISS_REASON_UNSPECIFIED:
        summary["x-kvloop-miss-reason"] = reason
    return {name: str(value) for name, value in summary.items()}


def _framing(api: common_pb2.Api.ValueType) -> sse.Framing:
    if api == common_pb2.API_RESPONSES:
        return sse.ResponseFraming()
    return sse.ChoiceFraming()


async def _start_stream(send: Send, headers: Mapping[str, str]) -> None:
    # The second header keeps nginx from collecting events.
    unbuffered = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    await http.start(send, 200, http.EVENT_STREAM, {**unbuffered, **headers})


def _echo(request_id: str) -> dict[str, str]:
    """The caller's own id, if it can stand in a header."""
    fits = 0 < len(request_id) <= _MAX_ECHOED_ID
    return {"x-request-id": request_id} if fits and _is_visible(request_id) else {}


def _is_visible(text: str) -> bool:
    return text.isascii() and text.isprintable()


def _typed(error: Exception) -> KvloopError:
    """The error itself, or a fixed text for a defect, whose details go to the log."""
    if isinstance(error, KvloopError):
        return error
    _log.error("gateway_failed", exc_info=error)
    return InternalError("internal error; the router's log has the details")
