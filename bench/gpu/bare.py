"""The bare protocol: both legs straight to two vLLM servers.

No router, ledger or sidecar. What kvloop adds to the time to the first token is seen
beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec

from bench.gpu.streams import Answer, completion, completion_body
from kvloop.bench.turns import TurnRequest, TurnResult
from kvloop.errors import UnavailableError

_NO_HANDLE = {"do_remote_decode": True, "do_remote_prefill": False}
_SURPLUS_TOKENS = 512
"""More than is read of a stream: hanging up early makes decode free its blocks, while
an answer that ends by itself is retained for the whole TTL."""
_COUNTED = {"include_usage": True, "continuous_usage_stats": True}
"""The engine's count of tokens with every chunk. It costs the engine 3 µs a chunk (vLLM 0.32)."""


class BareTurns:
    """Implements TurnRunner on two vLLM servers.

    vLLM 0.25 puts decode's handle into whole replies only. So a turn that leaves a
    handle for the next one is not streamed, and its time to the first token is that of
    the whole answer: look at last turns alone. Nor can what decode retains for a streamed
    turn be given up without that handle. So a last turn asks for more tokens than it
    wants, and hangs up once the engine has counted enough; through kvloop such a turn ends
    by itself, and its count is that of the same engine's usage. First chunks are alike.

    Args:
        session: for both servers.
        prefill_url: of the prefill server.
        decode_url: of the decode server.
        model: served model name.
        clock: monotonic seconds.
        last_ids: see KvloopTurns.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        prefill_url: str,
        decode_url: str,
        model: str,
        clock: Callable[[], float],
        *,
        last_ids: bool = True,
    ) -> None:
        self._session = session
        self._prefill_url = prefill_url
        self._decode_url = decode_url
        self._model = model
        self._clock = clock
        self._last_ids = last_ids
        self._handles: dict[str, dict[str, Any]] = {}

    async def run(self, request: TurnRequest) -> TurnResult:
        """See TurnRunner."""
        started = self._clock()
        prompt = msgspec.Raw(msgspec.json.encode(request.prompt))
        handle = self._handles.pop(request.conversation, None) if request.reuse else None
        prefilled = await self._whole(
            self._prefill_url,
            self._body(request, prompt, handle or _NO_HANDLE, max_tokens=1),
        )
        params = prefilled["kv_transfer_params"]
        handed_over = self._clock()
        if request.reuse and not request.last:
            body = self._body(request, prompt, params, max_tokens=request.answer_tokens)
            whole = await self._whole(self._decode_url, body)
            self._handles[request.conversation] = whole["kv_transfer_params"]
            answer = Answer(
                whole["choices"][0]["token_ids"],
                whole["usage"]["completion_tokens"],
                [self._clock()],
            )
        else:
            answer = await self._stream(request, prompt, params)
        pulled_tokens = handle["remote_num_tokens"] if handle else 0
        return answer.result(
            request,
            started,
            prefill_leg_seconds=handed_over - started,
            decode_leg_seconds=answer.times[0] - handed_over,
            pulled_tokens=pulled_tokens,
        )

    async def end(self, conversation: str) -> None:
        """See TurnRunner. A handle that is left is spent on a prompt of one token."""
        handle = self._handles.pop(conversation, None)
        if handle is not None:
            request = TurnRequest(conversation, [11], 1, True, True)
            prompt = msgspec.Raw(b"[11]")
            await self._whole(self._prefill_url, self._body(request, prompt, handle, max_tokens=1))

    def _body(
        self,
        request: TurnRequest,
        prompt: msgspec.Raw,
        params: dict[str, Any] | None,
        **members: Any,
    ) -> bytes:
        if params is not None:
            members["kv_transfer_params"] = params
        return completion_body(
            self._model,
            request,
            prompt,
            return_token_ids=self._last_ids or not request.last,
            cache_salt=request.cache_salt or request.conversation,
            **members,
        )

    async def _whole(self, url: str, body: bytes) -> dict[str, Any]:
        async with completion(self._session, url, body) as answer:
            whole: dict[str, Any] = msgspec.json.decode(await answer.read())
            return whole

    async def _stream(
        self, request: TurnRequest, prompt: msgspec.Raw, params: dict[str, Any] | None
    ) -> Answer:
        """An answer from decode, as it comes, up to as many tokens as are wanted."""
        wanted = request.answer_tokens
        body = self._body(
            request,
            prompt,
            params,
            max_tokens=wanted + _SURPLUS_TOKENS,
            stream=True,
            stream_options=_COUNTED,
        )
        answer = Answer()
        async with completion(self._session, self._decode_url, body) as reply:
            async for piece in answer.read(reply, self._clock):
                if answer.generated >= wanted:
                    reply.close()
                    return answer
                if piece.choices and piece.choices[0].finish_reason is not None:
                    break
        raise UnavailableError(f"the answer ended after {answer.generated} of {wanted} tokens")


class DecodeAlone(BareTurns):
    """Takes turns on the decode server alone, as steady load on it; nothing is retained."""

    async def run(self, request: TurnRequest) -> TurnResult:
        """See TurnRunner."""
        started = self._clock()
        prompt = msgspec.Raw(msgspec.json.encode(request.prompt))
        answer = await self._stream(request, prompt, None)
        return answer.result(request, started, decode_leg_seconds=answer.times[0] - started)
