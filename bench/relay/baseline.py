"""The usual relay: FastAPI and httpx, as in vLLM's example proxy. The yardstick.

    python -m bench.relay.baseline PREFILL_URL DECODE_URL PORT

Takes a request apart with `request.json()`, asks prefill for one token, and streams
decode's answer through `StreamingResponse`. No ledger, no conversation, no proof.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

_NO_HANDLE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def build_app(prefill_url: str, decode_url: str) -> FastAPI:
    """The relay between two engines."""
    clients: dict[str, httpx.AsyncClient] = {}

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with (
            httpx.AsyncClient(base_url=prefill_url, timeout=None, limits=limits) as prefill,
            httpx.AsyncClient(base_url=decode_url, timeout=None, limits=limits) as decode,
        ):
            clients.update(prefill=prefill, decode=decode)
            yield

    app = FastAPI(lifespan=lifespan)

    async def relay(path: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
        first = {**body, "kv_transfer_params": _NO_HANDLE, "stream": False, "max_tokens": 1}
        first.pop("stream_options", None)
        handed_over = await clients["prefill"].post(path, json=first)
        handed_over.raise_for_status()
        body["kv_transfer_params"] = handed_over.json()["kv_transfer_params"]
        async with clients["decode"].stream("POST", path, json=body) as answer:
            answer.raise_for_status()
            async for piece in answer.aiter_bytes():
                yield piece

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> StreamingResponse:
        events = relay("/v1/chat/completions", await request.json())
        return StreamingResponse(events, media_type="text/event-stream")

    @app.post("/v1/completions")
    async def completions(request: Request) -> StreamingResponse:
        events = relay("/v1/completions", await request.json())
        return StreamingResponse(events, media_type="text/event-stream")

    return app


if __name__ == "__main__":
    uvicorn.run(
        build_app(sys.argv[1], sys.argv[2]),
        host="127.0.0.1",
        port=int(sys.argv[3]),
        log_level="warning",
        timeout_keep_alive=75,
    )
