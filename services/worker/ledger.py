"""The port to the conversation ledger in kvmeta."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

import grpc

from kvloop import rpc
from kvloop.common.v1 import common_pb2
from kvloop.durations import to_duration, to_seconds
from kvloop.errors import KvloopError, TlsError, UnavailableError
from kvloop.kvmeta.v1 import ledger_pb2, ledger_pb2_grpc
from services.common import tracing
from services.worker.event_messages import EngineRef


@dataclass(frozen=True)
class Conversation:
    """Where a turn belongs."""

    tenant: str
    model: str
    conversation_id: str
    turn: int
    """Number from TakeHandle; 0 if the ledger could not be asked."""


@dataclass(frozen=True)
class Commit:
    """A finished turn's handle, on its way to the ledger."""

    conversation: Conversation
    turn_id: str
    worker_id: str
    engine: EngineRef
    params: bytes
    engine_ttl_seconds: float
    """Time from now until the engine drops the blocks by itself."""
    num_tokens: int
    num_blocks: int
    retention_ttl_seconds: float = 0.0
    """How long renewals can keep the blocks, from now; 0: there are none."""


class Ledger(Protocol):
    """Where finished turns are committed."""

    async def commit(self, commit: Commit, *, timeout_seconds: float) -> float:
        """Store the handle. Repeating it with the same turn_id does no harm.

        Returns:
            Seconds for which the ledger will give the handle out.

        Raises:
            ConflictError: TURN_SUPERSEDED, a newer turn is stored already.
            PreconditionError, InvalidFieldError, LimitError: it was refused;
                nothing is stored.
            UnavailableError: with metadata reached = "false", the call surely
                never reached the ledger; otherwise its fate is unknown.
            KvloopError: its fate is unknown.
        """


class GrpcLedger:
    """The ledger over gRPC.

    Args:
        channel: to kvmeta; not closed here.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._stub = ledger_pb2_grpc.LedgerServiceStub(channel)

    async def commit(self, commit: Commit, *, timeout_seconds: float) -> float:
        """Store the handle."""
        await self._connect(timeout_seconds)
        conversation = commit.conversation
        request = ledger_pb2.CommitTurnRequest(
            key=common_pb2.ConversationKey(
                tenant=conversation.tenant,
                model=conversation.model,
                conversation_id=conversation.conversation_id,
            ),
            request_id=commit.turn_id,
            turn=conversation.turn,
            worker_id=commit.worker_id,
            engine=common_pb2.EngineRef(
                engine_id=commit.engine.engine_id, epoch=commit.engine.epoch
            ),
            transfer_params_json=commit.params,
            engine_ttl=to_duration(commit.engine_ttl_seconds),
            num_tokens=commit.num_tokens,
            num_blocks=commit.num_blocks,
        )
        if commit.retention_ttl_seconds > 0:
            request.retention_ttl.CopyFrom(to_duration(commit.retention_ttl_seconds))
        with rpc.typed_errors():
            reply = await self._stub.CommitTurn(
                request, timeout=timeout_seconds, metadata=tracing.metadata()
            )
        return to_seconds(reply.granted_ttl)

    async def _connect(self, timeout_seconds: float) -> None:
        """Return once there is a connection.

        A call that fails after that may have been carried out; one that was not
        made was not. The difference decides whether blocks may be released.
        """
        why: KvloopError | None = None
        try:
            async with asyncio.timeout(timeout_seconds):
                if await rpc.connected(self._channel):
                    return
                why = await rpc.why_not_connected(self._channel)
        except TimeoutError:
            pass
        detail = f": {why.message}" if isinstance(why, TlsError) else ""
        raise UnavailableError(
            f"cannot reach the ledger{detail}", reason="LEDGER_UNREACHABLE", reached="false"
        )
