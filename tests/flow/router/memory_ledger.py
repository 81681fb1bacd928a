"""The ledger's rules over a dict, for router tests."""

from __future__ import annotations

from dataclasses import dataclass

from kvloop.common.v1 import common_pb2
from kvloop.errors import ConflictError, NotFoundError
from kvloop.kvmeta.v1 import ledger_pb2, registry_pb2
from services.router.ledger import Ending, Opening

MODEL = "tiny"
_State = ledger_pb2.Conversation


@dataclass
class _Row:
    state: _State.State.ValueType = _State.STATE_UNSPECIFIED
    handle: ledger_pb2.Handle | None = None
    turn: int = 0
    last_worker_id: str = ""
    holder: str = ""


class MemoryLedger:
    """The ledger's rules over a dict. See `services.router.ledger.Ledger`."""

    def __init__(self) -> None:
        self.rows: dict[bytes, _Row] = {}
        self.taken: list[str] = []
        self.returned: list[str] = []

    async def take_handle(
        self, key: common_pb2.ConversationKey, request_id: str, *, timeout_seconds: float
    ) -> Opening:
        row = self._row(key)
        row.turn += 1
        if row.state == _State.STATE_AVAILABLE:
            row.state, row.holder = _State.STATE_TAKEN, request_id
            assert row.handle is not None
            self.taken.append(row.handle.handle_id)
            return Opening(
                row.turn, row.handle, common_pb2.MISS_REASON_UNSPECIFIED, row.last_worker_id
            )
        return Opening(row.turn, None, _MISSES[row.state], row.last_worker_id)

    async def return_handle(
        self,
        key: common_pb2.ConversationKey,
        handle_id: str,
        request_id: str,
        *,
        timeout_seconds: float,
    ) -> None:
        row = self._row(key)
        held = row.state == _State.STATE_TAKEN and row.holder == request_id
        if not held or row.handle is None or row.handle.handle_id != handle_id:
            raise ConflictError("not held", reason="HANDLE_NOT_HELD")
        row.state = _State.STATE_AVAILABLE
        self.returned.append(handle_id)

    async def release(self, key: common_pb2.ConversationKey, *, timeout_seconds: float) -> Ending:
        row = self.rows.get(key.SerializeToString())
        if row is None:
            return Ending(found=False, released=False)
        released = row.state == _State.STATE_AVAILABLE
        if released:
            row.state = _State.STATE_RELEASED
        return Ending(found=True, released=released)

    async def get_conversation(
        self, key: common_pb2.ConversationKey, *, timeout_seconds: float
    ) -> ledger_pb2.Conversation:
        row = self.rows.get(key.SerializeToString())
        if row is None or row.handle is None:
            raise NotFoundError("no such conversation")
        conversation = ledger_pb2.Conversation(
            key=key,
            state=row.state,
            turn=row.handle.turn,
            worker_id=row.handle.worker_id,
            num_tokens=row.handle.num_tokens,
        )
        conversation.remaining_ttl.FromSeconds(60)
        return conversation

    def commit(
        self,
        key: common_pb2.ConversationKey,
        worker: registry_pb2.Worker,
        params: bytes,
        *,
        turn: int = 0,
    ) -> ledger_pb2.Handle:
        """Store a finished turn's handle, as a decode sidecar does."""
        row = self._row(key)
        row.turn = max(row.turn, turn)
        row.handle = ledger_pb2.Handle(
            handle_id=f"handle-{len(self.taken)}-{row.turn}",
            worker_id=worker.worker_id,
            engine=worker.engine,
            turn=row.turn,
            transfer_params_json=params,
            num_tokens=100,
        )
        row.state, row.last_worker_id = _State.STATE_AVAILABLE, worker.worker_id
        return row.handle

    def row(self, conversation_id: str, model: str = MODEL) -> _Row:
        """The row of a conversation of the default tenant."""
        return self._row(conversation(conversation_id, model))

    def _row(self, key: common_pb2.ConversationKey) -> _Row:
        return self.rows.setdefault(key.SerializeToString(), _Row())


_MISSES = {
    _State.STATE_UNSPECIFIED: common_pb2.MISS_REASON_FIRST_TURN,
    _State.STATE_TAKEN: common_pb2.MISS_REASON_TAKEN,
    _State.STATE_SPENT: common_pb2.MISS_REASON_SPENT,
    _State.STATE_RELEASED: common_pb2.MISS_REASON_RELEASED,
    _State.STATE_EXPIRED: common_pb2.MISS_REASON_EXPIRED,
    _State.STATE_VOID: common_pb2.MISS_REASON_VOID,
}


def conversation(conversation_id: str, model: str = MODEL) -> common_pb2.ConversationKey:
    """The ledger key of a conversation of the default tenant."""
    return common_pb2.ConversationKey(
        tenant="default", model=model, conversation_id=conversation_id
    )
