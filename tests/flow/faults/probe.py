"""Finds out whether a sidecar has found the ledger again after an outage."""

from __future__ import annotations

import asyncio
import itertools
import json

from kvloop import rpc
from kvloop.common.v1 import common_pb2
from kvloop.kvmeta.v1 import ledger_pb2, ledger_pb2_grpc
from kvloop.worker.v1 import worker_pb2, worker_pb2_grpc
from tests.flow.sim.engines import MODEL

_COMMITTED = worker_pb2.COMMIT_OUTCOME_COMMITTED
_numbers = itertools.count()


async def commits(sidecar_port: int, kvmeta_port: int) -> None:
    """Wait until a decode sidecar commits turns; nothing is left of those.

    Args:
        sidecar_port: its port.
        kvmeta_port: the port of the ledger.
    """
    name = f"probe-{next(_numbers)}"
    key = common_pb2.ConversationKey(tenant="probe", model=MODEL, conversation_id=name)
    async with (
        rpc.open_channel(f"127.0.0.1:{sidecar_port}") as sidecar,
        rpc.open_channel(f"127.0.0.1:{kvmeta_port}") as kvmeta,
    ):
        while not await _commits(worker_pb2_grpc.WorkerServiceStub(sidecar), key):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        ledger = ledger_pb2_grpc.LedgerServiceStub(kvmeta)
        await ledger.ReleaseConversation(ledger_pb2.ReleaseConversationRequest(key=key))


async def _commits(
    sidecar: worker_pb2_grpc.WorkerServiceAsyncStub, key: common_pb2.ConversationKey
) -> bool:
    request = worker_pb2.DecodeRequest(
        turn_id=f"probe-{next(_numbers)}",
        api=common_pb2.API_COMPLETIONS,
        body_json=json.dumps({"model": MODEL, "prompt": "probe " * 40, "max_tokens": 2}).encode(),
        commit=worker_pb2.TurnRef(key=key),
    )
    outcomes = [
        event.summary.commit_outcome
        async for event in sidecar.Decode(request)
        if event.HasField("summary")
    ]
    return outcomes == [_COMMITTED]
