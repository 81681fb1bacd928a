"""Ledgers that say in each answer which replica they are."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc

from kvloop.kvmeta.v1 import ledger_pb2, ledger_pb2_grpc
from services.common.rpc_server import Drain, serve


class _Ledger(ledger_pb2_grpc.LedgerServiceServicer):
    def __init__(self, number: int, answered: list[int]) -> None:
        self._number = number
        self._answered = answered

    async def TakeHandle(self, request, context):
        self._answered.append(self._number)
        return ledger_pb2.TakeHandleResponse(turn=self._number)


def serving(
    number: int, address: str, drain: Drain, answered: list[int]
) -> AbstractAsyncContextManager[int]:
    """One of them, while the block runs; its port.

    Args:
        number: by which it is known.
        address: where it listens.
        drain: how it leaves.
        answered: gets the number with each answer.
    """
    servicer = _Ledger(number, answered)  # type: ignore[abstract]
    return serve(
        address,
        lambda server: ledger_pb2_grpc.add_LedgerServiceServicer_to_server(servicer, server),
        [],
        grace_seconds=5,
        drain=drain,
    )


async def ask(channel: grpc.aio.Channel, times: int) -> Counter[int]:
    """Make calls, one after the other; how often each replica has answered."""
    stub: Any = ledger_pb2_grpc.LedgerServiceStub(channel)
    request = ledger_pb2.TakeHandleRequest()
    return Counter([(await stub.TakeHandle(request)).turn for _ in range(times)])
