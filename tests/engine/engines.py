"""What tests ask real engines directly, past kvloop."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp

_LOOK_SECONDS = 0.1


class EngineProbe:
    """One vLLM server's own HTTP interface.

    Args:
        url: base URL.
        session: HTTP session to use.
        model: served model name.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession, model: str) -> None:
        self.url = url
        self._session = session
        self._model = model

    async def counter(self, name: str, **labels: str) -> float:
        """Sum of a metric's series that carry these labels."""
        async with self._session.get(f"{self.url}/metrics") as response:
            text = await response.text()
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        total = 0.0
        for line in text.splitlines():
            series, _, value = line.rpartition(" ")
            if series.split("{")[0] == name and all(label in series for label in wanted):
                total += float(value)
        return total

    async def pulled_tokens(self) -> float:
        """Prompt tokens that the engine has loaded over NIXL, by its own count."""
        return await self.counter(
            "vllm:prompt_tokens_by_source_total", source="external_kv_transfer"
        )

    async def computed_tokens(self) -> float:
        """Prompt tokens that the engine has computed, by its own count."""
        return await self.counter("vllm:prompt_tokens_by_source_total", source="local_compute")

    async def running(self) -> float:
        """Requests that run or wait in the engine."""
        return await self.counter("vllm:num_requests_running") + await self.counter(
            "vllm:num_requests_waiting"
        )

    async def kv_usage(self) -> float:
        """Share of KV blocks in use, pinned ones included."""
        return await self.counter("vllm:kv_cache_usage_perc")

    async def forget_prefixes(self) -> None:
        """Empty the prefix cache, as on a prefill node that never saw the conversation.

        vLLM refuses while any block is in use, and frees what decode has read
        only in its next step: so this asks until it is done.
        """

        async def forgotten() -> bool:
            async with self._session.post(f"{self.url}/reset_prefix_cache") as response:
                assert response.status == 200, await response.text()
                return (await response.json())["success"] is True

        await eventually(forgotten, "the prefix cache is empty")

    async def recompute_prompt(self, prompt: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        """Greedy answer to token ids, everything computed here and now."""
        body = await self._post("/v1/completions", {"prompt": list(prompt)}, max_tokens)
        return tuple(body["choices"][0]["token_ids"])

    async def recompute_chat(
        self, messages: Sequence[dict[str, Any]], max_tokens: int
    ) -> tuple[int, ...]:
        """Greedy answer to a chat, everything computed here and now."""
        body = await self._post("/v1/chat/completions", {"messages": list(messages)}, max_tokens)
        return tuple(body["choices"][0]["token_ids"])

    async def chat_leg(
        self, messages: Sequence[dict[str, Any]], params: dict[str, Any], max_tokens: int
    ) -> dict[str, Any]:
        """One leg of a chat, as a router of one's own would run it: the whole reply."""
        fields = {"messages": list(messages), "kv_transfer_params": params}
        return await self._post("/v1/chat/completions", fields, max_tokens)

    async def _post(self, path: str, fields: dict[str, Any], max_tokens: int) -> dict[str, Any]:
        request = {
            **fields,
            "model": self._model,
            "max_tokens": max_tokens,
            "temperature": 0,
            "return_token_ids": True,
            # A salt that no one has used: neither local nor remote KV can match.
            "cache_salt": uuid.uuid4().hex,
        }
        async with self._session.post(f"{self.url}{path}", json=request) as response:
            answer: dict[str, Any] = await response.json()
            assert response.status == 200, answer
            return answer


def open_session() -> aiohttp.ClientSession:
    """For requests to engines.

    vLLM closes a connection that has been idle for a few seconds, maybe just when a
    request is sent on it: so each request has its own.
    """
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))


async def eventually(condition: Callable[[], Any], what: str, seconds: float = 20.0) -> None:
    """Wait until an async condition holds.

    Seconds are counted in looks: what is looked at answers as slowly as the machine is,
    and gets as much longer.

    Raises:
        AssertionError: it does not hold in time.
    """
    for _ in range(round(seconds / _LOOK_SECONDS)):
        if await condition():
            return
        await asyncio.sleep(_LOOK_SECONDS)
    assert await condition(), f"not in {seconds} s: {what}"
