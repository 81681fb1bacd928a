"""A client that stops reading stops the engine: nothing collects an answer for it."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

from tests.flow.load.counted import MOST_KEPT, PIECE_BYTES, PIECES, CountedPieces
from tests.flow.router.memory_ledger import MODEL
from tests.flow.router.stack import chat_request, running
from tests.flow.worker.stack import CHAT, LAST, SILENT_ENGINE, USAGE, decode_request, sidecar
from tests.unit.worker.fake_vllm import Answer, chunk, sse

PIECE = chunk("x" * PIECE_BYTES)


async def test_E8_a_grpc_client_that_stops_reading_holds_back_the_worker() -> None:
    async with running() as stack:
        pieces = CountedPieces(PIECE)
        stack["d0"].chunks = pieces  # type: ignore[assignment]
        call = aiter(stack.stub.Chat(chat_request()))
        events = [await anext(call)]

        assert await pieces.until_it_stops() <= MOST_KEPT

        events += [event async for event in call]
        assert sum(event.HasField("chunk") for event in events) == PIECES
        assert events[-1].HasField("result")


async def test_E8_an_http_client_that_stops_reading_holds_back_the_worker() -> None:
    async with running(settings={"gateway_listen": "127.0.0.1:0"}) as stack:
        pieces = CountedPieces(PIECE)
        stack["d0"].chunks = pieces  # type: ignore[assignment]
        messages = [{"role": "user", "content": "hello"}]
        body = json.dumps({"model": MODEL, "messages": messages, "stream": True}).encode()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE_BYTES)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", stack.router.gateway_port))
            head = (
                "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            )
            await loop.sock_sendall(client, head.encode() + body)

            assert await pieces.until_it_stops() <= MOST_KEPT

            received = 0
            end = b""
            while data := await loop.sock_recv(client, 1024 * 1024):
                received += len(data)
                end = (end + data)[-100:]
            assert received > PIECES * PIECE_BYTES
            assert b"data: [DONE]" in end


async def test_E8_a_router_that_stops_reading_holds_back_the_engine(tmp_path: Path) -> None:
    async with sidecar(tmp_path, **SILENT_ENGINE) as stack:
        pieces = CountedPieces(sse(PIECE, done=False)[0], sse(LAST, USAGE))
        stack.vllm.answers[CHAT] = Answer(steps=pieces)
        call = aiter(stack.stub.Decode(decode_request()))
        events = [await anext(call)]

        assert await pieces.until_it_stops() <= MOST_KEPT

        events += [event async for event in call]
        assert sum(len(event.batch.chunks_json) or 1 for event in events) >= PIECES
        assert events[-1].HasField("summary")
