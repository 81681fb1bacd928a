"""Turns through the router's HTTP front, from the client that the bare protocol has.

`kvloop.AsyncClient` speaks gRPC, which takes a process longer than HTTP. Here both ends of
a comparison are the same: what is left between them is kvloop's own.
"""

from __future__ import annotations

from collections.abc import Callable

import aiohttp
import msgspec

from bench.gpu.streams import Answer, completion, completion_body
from kvloop.bench.turns import TurnRequest, TurnResult, TurnRunner


class GatewayTurns:
    """Implements TurnRunner: last turns go over HTTP, and tell of times alone.

    Args:
        turns: takes the other turns, through the same router.
        session: for the router.
        url: of its HTTP front.
        model: served model name.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        turns: TurnRunner,
        session: aiohttp.ClientSession,
        url: str,
        model: str,
        clock: Callable[[], float],
    ) -> None:
        self._turns = turns
        self._session = session
        self._url = url
        self._model = model
        self._clock = clock

    async def run(self, request: TurnRequest) -> TurnResult:
        """See TurnRunner."""
        if not request.last:
            return await self._turns.run(request)
        started = self._clock()
        body = completion_body(
            self._model,
            request,
            msgspec.Raw(msgspec.json.encode(request.prompt)),
            max_tokens=request.answer_tokens,
            stream=True,
            stream_options={"include_usage": True},
            cache_salt=request.cache_salt or request.conversation,
            conversation_id=request.conversation,
            disable_reuse=not request.reuse,
        )
        answer = Answer()
        async with completion(self._session, self._url, body) as reply:
            async for _ in answer.read(reply, self._clock):
                pass
        return answer.result(request, started)

    async def end(self, conversation: str) -> None:
        """See TurnRunner."""
        await self._turns.end(conversation)
