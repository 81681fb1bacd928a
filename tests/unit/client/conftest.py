"""One set of tests for both clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvloop import Answer, AsyncClient, Chunk, Client, Completion
from tests.unit.client.fake_router import FakeRouter, serve_router


class _SyncAnswer:
    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        while (chunk := await asyncio.to_thread(next, self._answer, None)) is not None:
            yield chunk

    async def collect(self) -> Completion:
        return await asyncio.to_thread(self._answer.collect)

    def close(self) -> None:
        self._answer.close()


class _SyncClient:
    """The synchronous client, called from threads."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def chat(self, *args: Any, **kwargs: Any) -> _SyncAnswer:
        return _SyncAnswer(self._client.chat(*args, **kwargs))

    def generate(self, *args: Any, **kwargs: Any) -> _SyncAnswer:
        return _SyncAnswer(self._client.generate(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await asyncio.to_thread(method, *args, **kwargs)

        return call


@pytest.fixture
async def router() -> FakeRouter:
    """The router that the clients talk to."""
    return FakeRouter()


@pytest.fixture(params=["sync", "async"])
async def client(request, router: FakeRouter) -> AsyncIterator[Any]:
    """Each client in turn, with an asynchronous face."""
    async with serve_router(router) as address:
        if request.param == "sync":
            with Client(address) as sync_client:
                yield _SyncClient(sync_client)
        else:
            async with AsyncClient(address) as async_client:
                yield async_client
