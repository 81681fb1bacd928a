"""Drives kvloop's plugin and the endpoints whose bodies it parses, against one version's sources.

Run in a process of its own, with that version first on PYTHONPATH; prints "ok". Endpoints, their
dependencies and the models of requests are the version's own; FastAPI and Starlette are those
that are installed.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import msgspec

from services.worker.engine_front import HEAD_HEADER
from services.worker.engine_plugin import register
from tests.versions.stand_ins import stand_in_for_gguf, stand_in_for_orjson

_HEADS = {
    "/v1/completions": b'{"model": "m", "prompt": [1, 2, 3], "max_tokens": 7, "stream": true',
    "/v1/chat/completions": b'{"model": "m", "messages": [{"role": "user", "content": "\xc3\xa9"}]',
    "/v1/responses": b'{"model": "m", "input": "Hello", "temperature": 0.5',
}
_REST = b', "kv_transfer_params": {"remote_block_ids": [[1, 2]]}}'


def main() -> None:
    """Answer requests whose heads come ahead as those that come whole."""
    stand_in_for_gguf()
    stand_in_for_orjson()
    from starlette.requests import Request

    parsed = _note_what_is_parsed()
    untouched = Request.stream, Request.json
    os.environ.pop("KVLOOP_EVENTS_SOCKET", None)
    register()
    assert (Request.stream, Request.json) == untouched, "changed without a sidecar"
    app = _app()
    before = {path: asyncio.run(_ask(app, path, _REST)) for path in _HEADS}
    os.environ["KVLOOP_EVENTS_SOCKET"] = "/nowhere"
    register()
    for path in _HEADS:
        told = before[path]
        assert isinstance(told, str), (path, told)
        assert "remote_block_ids" in told, (path, told)
        assert asyncio.run(_ask(app, path, _REST)) == told
        assert not parsed, "parsed without being told of a head"
        assert asyncio.run(_ask(app, path, _REST, parsed)) == told
        assert parsed == [_HEADS[path] + b"}", b"{" + _REST[1:]], parsed
        for wrong in (b"}}", b",}", b', "user": "\\ud800", "temperature": "hot"}'):
            broken = asyncio.run(_ask(app, path, wrong))
            assert broken != told
            assert asyncio.run(_ask(app, path, wrong, parsed)) == broken, (path, wrong, broken)
        parsed.clear()
    sys.stdout.write("ok\n")


def _note_what_is_parsed() -> list[bytes]:
    """Texts that are given to msgspec from now on."""
    decode = msgspec.json.decode
    texts: list[bytes] = []

    def noted(text: bytes) -> Any:
        texts.append(text)
        return decode(text)

    vars(msgspec.json)["decode"] = noted
    return texts


def _app() -> Any:
    """The version's endpoints, and a serving that tells what it is asked."""
    from fastapi import FastAPI
    from vllm.entrypoints.openai.chat_completion.api_router import router as chat
    from vllm.entrypoints.openai.completion.api_router import router as completion
    from vllm.entrypoints.openai.responses.api_router import router as responses

    app = FastAPI()
    for router in (completion, chat, responses):
        app.include_router(router)
    app.state.openai_serving_completion = _Serving()
    app.state.openai_serving_chat = _Serving()
    app.state.openai_serving_responses = _Serving()
    return app


class _AskedError(Exception):
    """A serving was asked something."""


class _Serving:
    """In the place of one of vLLM's, with methods of any name."""

    def __getattr__(self, name: str) -> Any:
        async def serve(request: Any, raw_request: Any) -> Any:
            # Its id is drawn at random.
            raise _AskedError(repr(request.model_dump(exclude={"request_id"})))

        return serve


async def _ask(app: Any, path: str, rest: bytes, parsed: list[bytes] | None = None) -> Any:
    """What a serving was asked, or what the reply tells.

    Args:
        app: answers.
        path: the endpoint.
        rest: follows the head.
        parsed: of a request that says how long its head is: texts that were parsed, of which
            the head is one before the rest is there.
    """
    head = _HEADS[path]
    headers = [(b"content-type", b"application/json")]
    if parsed is not None:
        headers.append((HEAD_HEADER.lower().encode(), str(len(head)).encode()))
    told: list[Any] = []
    messages = [
        {"type": "http.request", "body": rest, "more_body": False},
        {"type": "http.request", "body": head, "more_body": True},
    ]

    async def receive() -> Any:
        if not messages:
            await asyncio.Event().wait()
        if len(messages) == 1 and parsed is not None:
            assert parsed[-1:] == [head + b"}"], "the head was not parsed while the rest came"
        return messages.pop()

    async def send(message: Any) -> None:
        told.append((message.get("status"), message.get("body")))

    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": path, "headers": headers}
    scope |= {"query_string": b"", "root_path": "", "scheme": "http", "http_version": "1.1"}
    try:
        await app(scope, receive, send)
    except _AskedError as asked:
        return str(asked)
    return told


if __name__ == "__main__":
    main()
