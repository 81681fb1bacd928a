"""A replica of kvmeta that goes away under a take costs no conversation its handle."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from kvloop.common.v1 import common_pb2
from kvloop.errors import KvloopError, UnavailableError
from kvloop.kvmeta.v1 import ledger_pb2, ledger_pb2_grpc
from services.common import rpc_server
from services.common.replicated_channel import open_replicated_channel
from services.router.ledger import GrpcLedger, Opening

KEY = common_pb2.ConversationKey(tenant="acme", model="tiny", conversation_id="c")


class _Ledger(ledger_pb2_grpc.LedgerServiceServicer):
    """Fails the first calls, each in its way."""

    def __init__(self, *failures: Callable[[Any], Awaitable[None]]) -> None:
        self.failures = list(failures)
        self.request_ids: list[str] = []

    async def TakeHandle(self, request, context):
        self.request_ids.append(request.request_id)
        if self.failures:
            await self.failures.pop(0)(context)
        return ledger_pb2.TakeHandleResponse(turn=7)


async def _gone(context) -> None:
    await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")


async def _stopping(context) -> None:
    await context.abort(grpc.StatusCode.CANCELLED, "CANCELLED")


async def _without_database(context) -> None:
    raise UnavailableError("no database", reason="DATABASE_UNAVAILABLE")


async def _take(servicer: _Ledger) -> Opening:
    async with (
        rpc_server.serve(
            "127.0.0.1:0",
            lambda server: ledger_pb2_grpc.add_LedgerServiceServicer_to_server(servicer, server),
            [],
            grace_seconds=0,
        ) as port,
        open_replicated_channel(f"127.0.0.1:{port}") as channel,
    ):
        return await GrpcLedger(channel).take_handle(KEY, "turn-1", timeout_seconds=5)


@pytest.mark.parametrize("failure", [_gone, _stopping])
async def test_a_take_is_repeated_under_its_id_when_its_replica_has_gone(failure) -> None:
    servicer = _Ledger(failure)  # type: ignore[abstract]

    assert (await _take(servicer)).turn == 7
    assert servicer.request_ids == ["turn-1", "turn-1"]


@pytest.mark.parametrize("failures", [[_gone, _gone, _gone], [_without_database]])
async def test_a_take_is_not_repeated_for_ever_nor_against_the_ledgers_word(failures) -> None:
    servicer = _Ledger(*failures)  # type: ignore[abstract]

    with pytest.raises(KvloopError):
        await _take(servicer)

    assert len(servicer.request_ids) == min(len(failures), 2)
