"""Who is asking, and which conversation it is about."""

from __future__ import annotations

from kvloop.common.v1 import common_pb2

_ONLY_TENANT = "default"


def tenant() -> str:
    """Tenant of a call. There is one, since callers carry no credentials."""
    return _ONLY_TENANT


def conversation_key(model: str, conversation_id: str) -> common_pb2.ConversationKey:
    """The ledger's key of a conversation."""
    return common_pb2.ConversationKey(tenant=tenant(), model=model, conversation_id=conversation_id)
