"""A request's body is parsed while its end is still to come.

A decode leg's body is known before the transfer params are, which prefill makes. The sidecar
sends the body's head ahead and says how long it is; here, in vLLM's API server,
the head is parsed when it has arrived. What is left for the moment at which the params come
is the short rest. vLLM would read the body when it is whole, with `json.loads`, which takes twice
as long as `msgspec`, which vLLM brings.

It never changes a result. `msgspec` takes nothing that `json.loads` does not, and makes the
same values of it, but for texts that nest nearly as deep as Python's stack. Whenever it
refuses something, be it NaN, half a surrogate pair, a split that is none, the whole body
goes to `json.loads`, with its errors.

Part of kvloop's plugin of vLLM (engine_plugin.py).
Runs inside vLLM: imports only the standard library, what vLLM brings, and siblings that do the
same.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from services.worker.engine_log import logger, said_once

HEAD_HEADER = "X-Kvloop-Head"
"""Header of a request: so many bytes of its body are, with `}` put behind them, a JSON object.
The bytes from there on are one too, if `{` takes the place of their `,`, or are `}` alone."""

_MOST_DIGITS = 12
"""Of the header. Longer ones are no length of a body."""
_NESTED = 400
"""Levels of a text that `json.loads` is sure to read: it gives up at Python's limit of 1,000
frames, some of which are the server's."""
_BLANK = b" \t\n\r"
_FRONT = "_kvloop_front"

_USED = "kvloop: bodies of requests are parsed as they arrive"
_UNABLE = "kvloop: this server reads bodies in another way; they are parsed when they are whole"

Decode = Callable[[bytes], Any]
"""Makes the value of a JSON text as `json.loads` does, or raises."""


def register() -> None:
    """Parse bodies ahead in this process."""
    try:
        from msgspec.json import decode
        from starlette.requests import Request
    except ImportError:
        logger.warning(_UNABLE)
        return
    parse_ahead(Request, decode)


def parse_ahead(request: type[Any], decode: Decode) -> None:
    """Let a class of requests parse those bodies ahead whose head's length is told.

    Args:
        request: Starlette's `Request`, of which servers make one for each request. Instances of
            subclasses, with which middleware passes bodies on, are left alone.
        decode: parses heads and rests.
    """
    stream_of: Any = getattr(request, "stream", None)
    json_of: Any = getattr(request, "json", None)
    if hasattr(stream_of, "kvloop_original"):
        return  # vLLM may load plugins more than once
    if not (callable(stream_of) and callable(json_of)):
        logger.warning(_UNABLE)
        return
    say = said_once()

    def length_of_head(self: Any) -> int | None:
        return _length(self.headers.get(HEAD_HEADER)) if type(self) is request else None

    def stream(self: Any) -> AsyncGenerator[bytes, None]:
        chunks = stream_of(self)
        length = length_of_head(self)
        if length is None or _FRONT in vars(self):
            return chunks  # type: ignore[no-any-return]
        front = Front(length, decode)
        setattr(self, _FRONT, front)
        return _seen_by(front, chunks)

    async def json(self: Any) -> Any:
        if length_of_head(self) is None:
            return await json_of(self)
        body = await self.body()
        front = vars(self).get(_FRONT)
        if front is None:
            say(logging.WARNING, _UNABLE)
            return await json_of(self)
        value = front.value(body)
        if value is None:
            return await json_of(self)
        say(logging.INFO, _USED)
        return value

    stream.kvloop_original = stream_of  # type: ignore[attr-defined]
    request.stream = stream
    request.json = json


class Front:
    """One body: its head, parsed when it is there, and then the whole."""

    def __init__(self, length: int, decode: Decode) -> None:
        """
        Args:
            length: of the head, in bytes, as far as the sender is right.
            decode: parses head and rest.
        """
        self._length = length
        self._decode = decode
        self._chunks: list[bytes] = []
        self._missing = length
        self._text = b""
        self._head: dict[str, Any] | None = None
        self._value: dict[str, Any] | None = None

    def add(self, chunk: bytes) -> None:
        """The next piece of the body. The one that completes the head has it parsed."""
        if self._missing <= 0:
            return
        self._chunks.append(chunk)
        self._missing -= len(chunk)
        if self._missing <= 0:
            self._text = b"".join(self._chunks)[: self._length]
            self._chunks.clear()
            self._head = _object(self._text + b"}", self._decode)

    def value(self, body: bytes) -> dict[str, Any] | None:
        """What `json.loads` makes of the body; None to say that it has to be asked.

        Args:
            body: the whole, of which the pieces that were added may be a part.
        """
        if self._head is not None and body.startswith(self._text):
            self._value = self._with_rest(self._head, body[len(self._text) :])
        # The request has the body, and lives as long as its answer takes.
        self._missing, self._text, self._head = 0, b"", None
        self._chunks.clear()
        return self._value

    def _with_rest(self, head: dict[str, Any], rest: bytes) -> dict[str, Any] | None:
        if rest.strip(_BLANK) == b"}":
            return head
        if not head or not rest.startswith(b","):
            return None
        # None, or no members: a comma stands before nothing.
        members = _object(b"{" + rest[1:], self._decode)
        return {**head, **members} if members else None


async def _seen_by(
    front: Front, chunks: AsyncGenerator[bytes, None]
) -> AsyncGenerator[bytes, None]:
    async with aclosing(chunks):
        async for chunk in chunks:
            front.add(chunk)
            yield chunk


def _length(header: str | None) -> int | None:
    """The number in a header; None without one, or if it is no length."""
    if header is None or not (header.isascii() and header.isdigit()):
        return None
    return int(header) if len(header) <= _MOST_DIGITS else None


def _object(text: bytes, decode: Decode) -> dict[str, Any] | None:
    """The value of a text that ends with `}`, which is an object if it is JSON at all.

    None if it is none, or may not be one for `json.loads`.
    """
    try:
        value: dict[str, Any] = decode(text)
    except Exception:
        return None  # `json.loads` has the last word, and the errors
    # Counting is fast, and nearly always enough.
    opened = text.count(b"{") + text.count(b"[")
    return None if opened > _NESTED and _nests_deep(value) else value


def _nests_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_NESTED):
        level = [
            item
            for container in level
            for item in (container.values() if type(container) is dict else container)
            if type(item) is dict or type(item) is list
        ]
        if not level:
            return False
    return True
