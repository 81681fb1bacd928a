"""Conversations from outside of the stack, over both of its ports."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp

from kvloop.aio import AsyncClient
from services.sim.vocabulary import WORDS
from tests.compose.stack import Stack

TURN_SECONDS = 120.0
ANSWER_TOKENS = 96


@dataclass(frozen=True)
class Said:
    """What one turn came to."""

    text: str
    pulled_tokens: int
    miss_reason: str | None
    prefill_worker_id: str = ""
    decode_worker_id: str = ""
    token_ids: tuple[int, ...] = ()


@dataclass
class Conversation:
    """A conversation that goes on turn by turn."""

    conversation_id: str
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, words: int = 60) -> list[dict[str, str]]:
        """Say something new; the whole history."""
        chosen = random.Random(f"{self.conversation_id} {len(self.messages)}")
        text = " ".join(chosen.choices(WORDS, k=words))
        self.messages.append({"role": "user", "content": text})
        return self.messages

    def answered(self, text: str) -> None:
        """Take an answer into the history."""
        self.messages.append({"role": "assistant", "content": text})


class Talker:
    """Sends turns to a stack, each once: neither client repeats a request by itself.

    Args:
        grpc: kvloop's own client.
        http: for the OpenAI API.
        url: base of that API.
        model: served model name.
    """

    def __init__(
        self, grpc: AsyncClient, http: aiohttp.ClientSession, url: str, model: str
    ) -> None:
        self._grpc = grpc
        self._http = http
        self._url = url
        self._model = model

    async def over_grpc(self, conversation: Conversation) -> Said:
        """One turn of a conversation with an id, streamed."""
        answer = self._grpc.chat(
            conversation.ask(),
            model=self._model,
            conversation_id=conversation.conversation_id,
            max_tokens=ANSWER_TOKENS,
            extra_body={"ignore_eos": True},
            timeout_seconds=TURN_SECONDS,
        )
        async with answer:
            done = await answer.collect()
        _check_whole(done.usage.completion_tokens)
        conversation.answered(done.text)
        receipt = done.receipt
        return Said(
            done.text,
            receipt.pulled_tokens,
            receipt.miss_reason,
            receipt.prefill_worker_id,
            receipt.decode_worker_id,
        )

    async def over_http(self, conversation: Conversation) -> Said:
        """One turn of a conversation that is known by its history alone, whole."""
        async with self._http.post(
            f"{self._url}/v1/chat/completions", json=self._body(conversation)
        ) as reply:
            assert reply.status == 200, await reply.text()
            body = await reply.json()
            headers = reply.headers
        _check_whole(body["usage"]["completion_tokens"])
        text = body["choices"][0]["message"]["content"]
        conversation.answered(text)
        reason = headers.get("x-kvloop-miss-reason")
        return Said(text, int(headers["x-kvloop-pulled-tokens"]), reason)

    async def streamed_over_http(self, conversation: Conversation) -> Said:
        """The same, as server-sent events; what was pulled is not told."""
        text, tokens, ended = "", 0, False
        body = {
            **self._body(conversation),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with self._http.post(f"{self._url}/v1/chat/completions", json=body) as reply:
            assert reply.status == 200, await reply.text()
            async for line in reply.content:
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    ended = True
                elif data:
                    event = json.loads(data)
                    assert "error" not in event, event
                    for choice in event["choices"]:
                        text += choice["delta"].get("content") or ""
                    tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        assert ended, "the stream broke off"
        _check_whole(tokens)
        conversation.answered(text)
        return Said(text, 0, None)

    async def tokens_over_grpc(self, conversation_id: str, prompt: Sequence[int]) -> Said:
        """One turn in token ids, which come back as they were said."""
        answer = self._grpc.generate(
            prompt,
            model=self._model,
            conversation_id=conversation_id,
            max_tokens=ANSWER_TOKENS,
            extra_body={"ignore_eos": True, "return_token_ids": True},
            timeout_seconds=TURN_SECONDS,
        )
        async with answer:
            done = await answer.collect()
        receipt = done.receipt
        return Said(done.text, receipt.pulled_tokens, receipt.miss_reason, token_ids=done.token_ids)

    async def tokens_over_http(self, conversation_id: str, prompt: Sequence[int]) -> Said:
        """The same over HTTP."""
        body = {
            "model": self._model,
            "prompt": prompt,
            "conversation_id": conversation_id,
            "max_tokens": ANSWER_TOKENS,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        async with self._http.post(f"{self._url}/v1/completions", json=body) as reply:
            assert reply.status == 200, await reply.text()
            choice = (await reply.json())["choices"][0]
            headers = reply.headers
        return Said(
            choice["text"],
            int(headers["x-kvloop-pulled-tokens"]),
            headers.get("x-kvloop-miss-reason"),
            token_ids=tuple(choice["token_ids"]),
        )

    def _body(self, conversation: Conversation) -> dict[str, object]:
        return {
            "model": self._model,
            "messages": conversation.ask(),
            "max_tokens": ANSWER_TOKENS,
            "ignore_eos": True,
        }


def _check_whole(tokens: int) -> None:
    """An answer that ends early is a failure, however well-formed its end."""
    assert tokens == ANSWER_TOKENS, f"{tokens} tokens of {ANSWER_TOKENS}"


@asynccontextmanager
async def talker(stack: Stack, model: str) -> AsyncIterator[Talker]:
    """Clients of both ports, closed on exit."""
    timeout = aiohttp.ClientTimeout(total=TURN_SECONDS)
    async with (
        AsyncClient(f"127.0.0.1:{stack.grpc_port}", api_key="") as grpc,
        aiohttp.ClientSession(timeout=timeout) as http,
    ):
        yield Talker(grpc, http, f"http://127.0.0.1:{stack.http_port}", model)
