"""A whole kvloop in one process, with mutual TLS on every hop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kvloop import AsyncClient, Completion
from tests.flow.gateway.fleet import PREAMBLE, Fleet, fleet
from tests.flow.sim.engines import MODEL
from tests.flow.tls.authority import Authority


@asynccontextmanager
async def secured_fleet(
    tmp_path: Path, authority: Authority, *, host: str = "127.0.0.1", **sim: Any
) -> AsyncIterator[Fleet]:
    """A fleet in which every service knows who may call it.

    The workers' certificate carries no address, so it is their name that counts.
    """
    kvmeta, router = authority.issue("kvmeta"), authority.issue("router")
    worker = authority.issue("worker", "anywhere.example")
    async with fleet(
        tmp_path,
        host=host,
        sim=sim,
        kvmeta=authority.serving(kvmeta, "router.kvloop, worker.kvloop,operator.kvloop"),
        worker=authority.serving(worker, "router.kvloop") | authority.calling(worker),
        **authority.serving(router),
        **authority.calling(router),
        peer_tls_worker_name="worker.kvloop",
    ) as running:
        yield running


def messages(*said: str) -> list[dict[str, Any]]:
    """A history of user and assistant in turn."""
    return [
        {"role": "assistant" if index % 2 else "user", "content": text}
        for index, text in enumerate((PREAMBLE + said[0], *said[1:]))
    ]


async def turn(
    client: AsyncClient, conversation: str, *said: str, max_tokens: int = 150
) -> Completion:
    """One chat turn, to its end."""
    return await client.chat(
        messages(*said), model=MODEL, conversation_id=conversation, max_tokens=max_tokens
    ).collect()
