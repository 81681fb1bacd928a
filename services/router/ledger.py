"""The conversation ledger as the router sees it: a port and its gRPC form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import grpc

from kvloop.common.v1 import common_pb2
from kvloop.errors import CancelledByPeerError, KvloopError, UnavailableError
from kvloop.kvmeta.v1 import ledger_pb2, ledger_pb2_grpc
from kvloop.rpc import typed_errors
from services.common import tracing
from services.common.rpc_tracing import trace_context
from services.router.spare_calls import UnaryAhead


@dataclass(frozen=True)
class Opening:
    """The ledger's answer when a turn is opened."""

    turn: int
    """Number of the turn in its conversation, from 1."""
    handle: ledger_pb2.Handle | None
    """The conversation's handle, now held by this turn alone."""
    miss_reason: common_pb2.MissReason.ValueType
    """Why there is no handle; unspecified if there is one."""
    last_worker_id: str
    """Decode worker that last served the conversation, or empty."""


@dataclass(frozen=True)
class Ending:
    """The ledger's answer when a conversation is ended."""

    found: bool
    """Whether the ledger knew the conversation."""
    released: bool
    """Whether this call gave up retained KV."""


class Ledger(Protocol):
    """Gives each handle out once and takes it back only from its holder.

    Every method raises a KvloopError: UnavailableError if the ledger cannot be
    reached, DeadlineError if it does not answer within `timeout_seconds`.
    """

    async def take_handle(
        self, key: common_pb2.ConversationKey, request_id: str, *, timeout_seconds: float
    ) -> Opening:
        """Open the conversation's next turn and take its handle, if it has one.

        Repeating the call with one request_id gives the same answer.
        """
        ...

    async def return_handle(
        self,
        key: common_pb2.ConversationKey,
        handle_id: str,
        request_id: str,
        *,
        timeout_seconds: float,
    ) -> None:
        """Make a handle available again that no prefill engine has seen.

        Raises:
            ConflictError: request_id does not hold the handle, or it expired.
        """
        ...

    async def release(self, key: common_pb2.ConversationKey, *, timeout_seconds: float) -> Ending:
        """End a conversation. An unknown one is an answer, not an error."""
        ...

    async def get_conversation(
        self, key: common_pb2.ConversationKey, *, timeout_seconds: float
    ) -> ledger_pb2.Conversation:
        """Read a conversation and change nothing.

        Raises:
            NotFoundError: the ledger holds no such conversation.
        """
        ...


class GrpcLedger:
    """The ledger of a kvmeta service. See `Ledger`."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = ledger_pb2_grpc.LedgerServiceStub(channel)
        self._take_handle = UnaryAhead(
            channel,
            "/kvloop.kvmeta.v1.LedgerService/TakeHandle",
            ledger_pb2.TakeHandleRequest.SerializeToString,
            ledger_pb2.TakeHandleResponse.FromString,
        )

    def close(self) -> None:
        """Hold nothing ready for further turns; the channel is about to close."""
        self._take_handle.close()

    async def take_handle(
        self, key: common_pb2.ConversationKey, request_id: str, *, timeout_seconds: float
    ) -> Opening:
        """See `Ledger.take_handle`."""
        request = ledger_pb2.TakeHandleRequest(
            key=key, request_id=request_id, trace_context=trace_context()
        )
        try:
            response = await self._take(request, timeout_seconds)
        except KvloopError as error:
            if not _replica_left(error):
                raise
            response = await self._take(request, timeout_seconds)
        return Opening(
            turn=response.turn,
            handle=response.handle if response.HasField("handle") else None,
            miss_reason=response.miss_reason,
            last_worker_id=response.last_worker_id,
        )

    async def _take(
        self, request: ledger_pb2.TakeHandleRequest, timeout_seconds: float
    ) -> ledger_pb2.TakeHandleResponse:
        with typed_errors():
            return await self._take_handle(request, timeout_seconds=timeout_seconds)

    async def return_handle(
        self,
        key: common_pb2.ConversationKey,
        handle_id: str,
        request_id: str,
        *,
        timeout_seconds: float,
    ) -> None:
        """See `Ledger.return_handle`."""
        request = ledger_pb2.ReturnHandleRequest(
            key=key, handle_id=handle_id, request_id=request_id
        )
        with typed_errors():
            await self._stub.ReturnHandle(
                request, timeout=timeout_seconds, metadata=tracing.metadata()
            )

    async def release(self, key: common_pb2.ConversationKey, *, timeout_seconds: float) -> Ending:
        """See `Ledger.release`."""
        request = ledger_pb2.ReleaseConversationRequest(key=key)
        with typed_errors():
            response = await self._stub.ReleaseConversation(request, timeout=timeout_seconds)
        return Ending(found=response.found, released=response.released)

    async def get_conversation(
        self, key: common_pb2.ConversationKey, *, timeout_seconds: float
    ) -> ledger_pb2.Conversation:
        """See `Ledger.get_conversation`."""
        request = ledger_pb2.GetConversationRequest(key=key)
        with typed_errors():
            response = await self._stub.GetConversation(request, timeout=timeout_seconds)
        return response.conversation


def _replica_left(error: KvloopError) -> bool:
    """True if the replica that was asked has gone; another may answer.

    What kvmeta says itself has a reason of its own.
    """
    left = isinstance(error, UnavailableError | CancelledByPeerError)
    return left and error.reason == error.default_reason
