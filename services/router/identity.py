"""Who is asking, and which conversation it is about."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from kvloop.common.v1 import common_pb2
from kvloop.errors import InvalidFieldError

DEFAULT_TENANT = "default"


@dataclass(frozen=True)
class Caller:
    """Whose request it is."""

    tenant: str = DEFAULT_TENANT
    """Owner of the conversations."""
    isolated: bool = False
    """Whether engines must keep the tenant's KV apart from that of others. Off
    where there is one tenant only, so that its requests reach engines unchanged."""

    def cache_salt(self, own: str | None) -> str | None:
        """The cache salt that engines get; None for none.

        Args:
            own: the salt that the request brings. It tells apart KV of this
                tenant only: no salt of a caller reaches another tenant's KV.
        """
        if not self.isolated:
            return own
        parts = [self.tenant] if own is None else [self.tenant, own]
        return hashlib.sha256("\0".join(map(_escaped, parts)).encode()).hexdigest()


ANYONE = Caller()
"""The caller where no keys are configured."""


def conversation_key(
    tenant: str, model: str, conversation_id: str = ""
) -> common_pb2.ConversationKey:
    """The ledger's key of a conversation; without an id if it is to be derived."""
    return common_pb2.ConversationKey(tenant=tenant, model=model, conversation_id=conversation_id)


def one_conversation_id(named: Mapping[str, str]) -> str:
    """The conversation id that a request names; empty if it names none.

    Args:
        named: what each place that can name one says, best first; empty values
            say nothing.

    Raises:
        InvalidFieldError: two places contradict each other.
    """
    said = {place: value for place, value in named.items() if value}
    if len(set(said.values())) > 1:
        places = " and ".join(said)
        raise InvalidFieldError(
            f"{places} name different conversations; send one of them",
            reason="CONVERSATION_CONFLICT",
            field=next(iter(said)),
        )
    return next(iter(said.values()), "")


def _escaped(text: str) -> str:
    """The text without NUL, so that joining by NUL stays unambiguous."""
    return text.replace("\\", "\\\\").replace("\0", "\\0")
