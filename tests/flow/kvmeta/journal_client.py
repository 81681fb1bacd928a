"""A client of the ledger that notes down what it did and was told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

import grpc

from kvloop.common.v1 import common_pb2
from kvloop.errors import UnavailableError, from_rpc_error
from kvloop.kvmeta.v1 import ledger_pb2, ledger_pb2_grpc
from tests.flow.kvmeta.journal import Journal
from tests.flow.kvmeta.ledger_spec import (
    Answer,
    Commit,
    Done,
    End,
    Ended,
    Evict,
    Evicted,
    Extend,
    Given,
    Missed,
    Operation,
    Read,
    ReadReleases,
    Refused,
    Renew,
    Renewed,
    Return,
    Seen,
    Take,
)
from tests.flow.kvmeta.replicas import Replica
from tests.unit.kvmeta import messages

_CALL_TIMEOUT_SECONDS = 60
_RETENTION_SECONDS = 960
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)
_REFUSALS = ("CONVERSATION_NOT_FOUND", "HANDLE_NOT_HELD", "TURN_SUPERSEDED")
_STATE = "STATE_"
_MISS = "MISS_REASON_"
_VERDICT = "VERDICT_"


class JournalClient:
    """Talks to whichever replica is up.

    Args:
        replicas: where to call.
        journal: where it is noted down.
        rng: chooses among replicas.
    """

    def __init__(self, replicas: Sequence[Replica], journal: Journal, rng: Random) -> None:
        self._replicas = replicas
        self._journal = journal
        self._rng = rng

    async def ask(
        self, conversation: str, operation: Operation, handle_id: str = ""
    ) -> tuple[Answer | None, str]:
        """One call; its answer and the id of the handle in it. None: it was lost.

        Args:
            conversation: what the call is about.
            operation: what to do.
            handle_id: of the handle to return.
        """
        replica = await self._any_that_is_up()
        call = self._journal.begin(conversation, operation)
        try:
            answer, found_id = await _send(replica.ledger, conversation, operation, handle_id)
        except grpc.aio.AioRpcError as error:
            kvloop_error = from_rpc_error(error)
            if kvloop_error.reason in _REFUSALS:
                answer, found_id = Refused(kvloop_error.reason), ""
            elif error.code() in _LOST:
                # Words of kvmeta's own ("the database is away") come from a process
                # that lives, and may still carry the call out.
                process_died = kvloop_error.reason == UnavailableError.default_reason
                replica.when_settled(lambda: self._journal.settled(call), process_died=process_died)
                return None, ""
            else:
                raise
        self._journal.answered(call, answer, found_id)
        return answer, found_id

    async def _any_that_is_up(self) -> Replica:
        up = [each for each in self._replicas if each.up.is_set()]
        chosen = self._rng.choice(up or self._replicas)
        await chosen.up.wait()
        return chosen


def params(request: str) -> bytes:
    """Transfer params that tell which turn committed them."""
    return json.dumps({"committed_by": request}).encode()


def committed_by(handle: ledger_pb2.Handle) -> str:
    """The turn that committed a handle, by its params."""
    found: str = json.loads(handle.transfer_params_json)["committed_by"]
    return found


async def _send(
    ledger: ledger_pb2_grpc.LedgerServiceAsyncStub,
    conversation: str,
    operation: Operation,
    handle_id: str,
) -> tuple[Answer, str]:
    key = messages.conversation(conversation)
    how: dict[str, Any] = {"timeout": _CALL_TIMEOUT_SECONDS, "wait_for_ready": True}
    match operation:
        case Take(request):
            taken = await ledger.TakeHandle(messages.take(conversation, request), **how)
            if taken.HasField("handle"):
                return Given(committed_by(taken.handle), taken.turn), taken.handle.handle_id
            reason = common_pb2.MissReason.Name(taken.miss_reason).removeprefix(_MISS)
            return Missed(reason, taken.turn), ""
        case Commit(request, turn):
            commit = messages.commit(conversation, request, turn)
            commit.transfer_params_json = params(request)
            commit.retention_ttl.CopyFrom(messages.seconds(_RETENTION_SECONDS))
            return Done(), (await ledger.CommitTurn(commit, **how)).handle_id
        case Return(_, request):
            await ledger.ReturnHandle(
                ledger_pb2.ReturnHandleRequest(key=key, handle_id=handle_id, request_id=request),
                **how,
            )
            return Done(), ""
        case End():
            ended = await ledger.ReleaseConversation(
                ledger_pb2.ReleaseConversationRequest(key=key), **how
            )
            return Ended(ended.found, ended.released), ""
        case Extend(ttl_seconds):
            await ledger.ExtendConversation(
                ledger_pb2.ExtendConversationRequest(key=key, ttl=messages.seconds(ttl_seconds)),
                **how,
            )
            return Done(), ""
        case Read():
            read = await ledger.GetConversation(ledger_pb2.GetConversationRequest(key=key), **how)
            return _seen(read.conversation), ""
        case Renew(handle, extension_seconds):
            pin = ledger_pb2.HeldPin(
                turn_id=handle,
                engine_remaining=messages.seconds(480),
                deadline_extension=messages.seconds(extension_seconds),
            )
            renewed = await ledger.RenewPins(
                ledger_pb2.RenewPinsRequest(worker_id="d1", engine=messages.engine(), pins=[pin]),
                **how,
            )
            verdict = ledger_pb2.PinStatus.Verdict.Name(renewed.pins[0].verdict)
            return Renewed(verdict.removeprefix(_VERDICT)), ""
        case Evict(handle):
            evicted = await ledger.EvictHandles(
                ledger_pb2.EvictHandlesRequest(
                    worker_id="d1", engine=messages.engine(), turn_ids=[handle]
                ),
                **how,
            )
            return Evicted(handle in evicted.evicted_turn_ids), ""
        case ReadReleases():
            raise TypeError("releases are read for all conversations at once")


def _seen(read: ledger_pb2.Conversation) -> Seen:
    state = ledger_pb2.Conversation.State.Name(read.state).removeprefix(_STATE)
    ttl = read.conversation_ttl.seconds if read.HasField("conversation_ttl") else None
    return Seen(state, read.turn, ttl)
