"""Clients: how a turn is sent, and what came of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp

from bench.soak.stack import MODEL, Router
from bench.soak.talks import ChatTalk, Said, Talk, TokenTalk
from kvloop.aio import AsyncClient
from kvloop.errors import CancelledByPeerError, KvloopError, LimitError, UnavailableError
from kvloop.receipts import Receipt

_IDLE_SECONDS = 2.0
"""Shorter than the router keeps idle HTTP connections, so that none closes just
when a turn is sent on it."""
_TRANSIENT_STATUS = frozenset({429, 503})


@dataclass(frozen=True)
class Trouble:
    """Why a turn was not answered to its end.

    Attributes:
        what: the error, short enough to be counted.
        transient: it says that repeating may help.
        detail: its text.
    """

    what: str
    transient: bool
    detail: str = ""


@dataclass
class Heard:
    """What came of one turn.

    Attributes:
        said: the answer, as far as it came.
        trouble: why it did not come to its end, if so.
        receipt: what kvloop did, over gRPC.
        left: the client hung up on purpose.
    """

    said: Said
    trouble: Trouble | None = None
    receipt: Receipt | None = None
    left: bool = False


@dataclass(frozen=True)
class Manner:
    """How a client goes about one turn.

    Attributes:
        answer: tokens to ask for.
        fault: for the engines to inject; empty for none.
        leave_after: pieces of the answer after which to hang up.
        pause_after: pieces of the answer after which to stop reading for a while.
        pause_seconds: how long that is.
    """

    answer: int
    fault: str = ""
    leave_after: int | None = None
    pause_after: int | None = None
    pause_seconds: float = 0.0

    @property
    def extra(self) -> dict[str, Any]:
        """Members of the request's body."""
        xargs = {"vllm_xargs": {"sim_fault": self.fault}} if self.fault else {}
        return {"ignore_eos": True, **xargs}


@dataclass
class _Pieces:
    """Counts the pieces of an answer, and does what its client does after some."""

    manner: Manner
    count: int = field(default=0)

    async def leave(self) -> bool:
        """Note one more piece; True if it was the last that the client waits for."""
        self.count += 1
        if self.count == self.manner.pause_after:
            await asyncio.sleep(self.manner.pause_seconds)
        return self.count == self.manner.leave_after


class Speaker(Protocol):
    """A kind of client of one router."""

    async def say(self, talk: Talk, manner: Manner) -> Heard:
        """Send the conversation as it stands, and hear the answer."""
        ...


class TokensOverGrpc:
    """Token ids over kvloop's own API."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def say(self, talk: Talk, manner: Manner) -> Heard:
        """See Speaker."""
        assert isinstance(talk, TokenTalk)
        said: list[int] = []
        heard, pieces = Heard(said), _Pieces(manner)
        answer = self._client.generate(
            talk.tokens,
            model=MODEL,
            conversation_id=talk.name,
            max_tokens=manner.answer,
            extra_body={**manner.extra, "return_token_ids": True},
        )
        try:
            async with answer:
                async for chunk in answer:
                    for choice in chunk.choices:
                        said += choice.token_ids or ()
                    if await pieces.leave():
                        heard.left = True
                        return heard
                heard.receipt = (await answer.collect()).receipt
        except KvloopError as error:
            transient = isinstance(error, UnavailableError | LimitError | CancelledByPeerError)
            what = f"gRPC {error.code.name} {error.reason}"
            heard.trouble = Trouble(what, transient, error.message)
        return heard


class OverHttp:
    """Streams over the OpenAI API: chats without an id, and prompts in token ids."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def say(self, talk: Talk, manner: Manner) -> Heard:
        """See Speaker."""
        heard = Heard([] if isinstance(talk, TokenTalk) else "")
        try:
            await self._hear(talk, manner, heard)
        except (aiohttp.ClientError, ConnectionError) as error:
            heard.trouble = Trouble(f"HTTP {type(error).__name__}", True, str(error))
        return heard

    async def _hear(self, talk: Talk, manner: Manner, heard: Heard) -> None:
        path, body = _request(talk)
        body |= {"model": MODEL, "max_tokens": manner.answer, "stream": True, **manner.extra}
        pieces = _Pieces(manner)
        async with self._session.post(self._url + path, json=body) as reply:
            if reply.status != 200:
                heard.trouble = _refused(reply.status, await reply.text())
                return
            async for line in reply.content:
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    return
                if data:
                    _take(heard, json.loads(data))
                    if await pieces.leave():
                        heard.left = True
                        return
        heard.trouble = heard.trouble or Trouble("HTTP stream without an end", False)


def _request(talk: Talk) -> tuple[str, dict[str, Any]]:
    if isinstance(talk, TokenTalk):
        more = {"return_token_ids": True, "conversation_id": talk.name}
        return "/v1/completions", {"prompt": talk.tokens, **more}
    assert isinstance(talk, ChatTalk)
    return "/v1/chat/completions", {"messages": talk.messages}


def _take(heard: Heard, event: Mapping[str, Any]) -> None:
    if "error" in event:
        error = event["error"]
        code = int(error.get("code") or 500)
        heard.trouble = Trouble(
            f"SSE {code} {error.get('type')}", code in _TRANSIENT_STATUS, str(error.get("message"))
        )
        return
    for choice in event["choices"]:
        if isinstance(heard.said, list):
            heard.said += choice.get("token_ids") or ()
        else:
            heard.said += choice["delta"].get("content") or ""


def _refused(status: int, text: str) -> Trouble:
    try:
        kind = json.loads(text)["error"]["type"]
    except (ValueError, KeyError, TypeError):
        kind = "without an error object"
    return Trouble(f"HTTP {status} {kind}", status in _TRANSIENT_STATUS, text[:300])


@dataclass(frozen=True)
class Front:
    """The clients of one router."""

    grpc: AsyncClient
    tokens_over_grpc: TokensOverGrpc
    over_http: OverHttp


@asynccontextmanager
async def fronts(routers: tuple[Router, ...]) -> AsyncIterator[list[Front]]:
    """Clients of every router: one gRPC channel and one HTTP pool each, closed on exit."""
    async with AsyncExitStack() as stack:
        found = []
        for router in routers:
            grpc = await stack.enter_async_context(
                AsyncClient(f"127.0.0.1:{router.service.port}", api_key="")
            )
            session = await stack.enter_async_context(
                aiohttp.ClientSession(
                    timeout=aiohttp.ClientTimeout(total=None),
                    connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS),
                )
            )
            http = OverHttp(session, f"http://127.0.0.1:{router.gateway_port}")
            found.append(Front(grpc, TokensOverGrpc(grpc), http))
        yield found
