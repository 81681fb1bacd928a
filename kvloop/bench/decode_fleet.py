"""What the registry says of a model's decode workers: their blocks, and what is retained."""

from __future__ import annotations

import asyncio
from typing import Protocol

from kvloop.bench.samples import KvBlocks
from kvloop.common.v1 import common_pb2
from kvloop.errors import KvloopError, UnavailableError
from kvloop.inventory import list_workers
from kvloop.kvmeta.v1 import registry_pb2
from kvloop.tls import TlsSource


class DecodeFleet(Protocol):
    """The decode workers of one model, as the ledger and the registry know them."""

    async def blocks(self) -> KvBlocks:
        """Their KV blocks.

        Raises:
            KvloopError: they cannot be asked about, or there are none.
        """
        ...

    async def retained_blocks(self) -> int:
        """KV blocks that are retained on all of them now.

        Raises:
            KvloopError: they cannot be asked about.
        """
        ...


async def retained_if_known(fleet: DecodeFleet | None) -> int | None:
    """KV blocks that are retained now; None if nobody can be asked.

    A measurement goes on without this figure.
    """
    if fleet is None:
        return None
    try:
        return await fleet.retained_blocks()
    except KvloopError:
        return None


class KvmetaFleet:
    """Implements DecodeFleet over kvmeta.

    Args:
        kvmeta: host:port of kvmeta.
        model: served model name.
        tls: how to speak TLS; without it nothing is encrypted.
    """

    def __init__(self, kvmeta: str, model: str, tls: TlsSource | None = None) -> None:
        self._kvmeta = kvmeta
        self._model = model
        self._tls = tls

    async def blocks(self) -> KvBlocks:
        """See DecodeFleet."""
        traits = [entry.worker.traits for entry in await self._workers()]
        if not traits or not traits[0].block_size:
            raise UnavailableError(f"kvmeta knows no decode worker of {self._model!r}")
        return KvBlocks(
            tokens=traits[0].block_size,
            bytes=traits[0].kv_block_bytes,
            total=sum(each.num_kv_blocks for each in traits),
        )

    async def retained_blocks(self) -> int:
        """See DecodeFleet."""
        return sum(entry.retained_blocks for entry in await self._workers())

    async def _workers(self) -> list[registry_pb2.WorkerEntry]:
        found = await asyncio.to_thread(
            lambda: list(list_workers(self._kvmeta, model=self._model, tls=self._tls))
        )
        return [each for each in found if each.worker.role == common_pb2.WORKER_ROLE_DECODE]
