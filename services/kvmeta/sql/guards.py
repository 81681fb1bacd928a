"""Conditions and expressions that several statements share.

Bound parameters: `key_*` say which row, `by_*` who acts, `at_now` when.
"""

from __future__ import annotations

import sqlalchemy as sa

from services.kvmeta.model import ConversationKey
from services.kvmeta.sql.tables import conversations, workers

_c = conversations.c

NOW = sa.bindparam("at_now", type_=sa.BigInteger)
REQUEST = sa.bindparam("by_request", type_=sa.String)
THIS = sa.and_(
    _c.tenant == sa.bindparam("key_tenant"),
    _c.model == sa.bindparam("key_model"),
    _c.conversation_id == sa.bindparam("key_conversation_id"),
)
NEXT_REVISION = sa.case((_c.revision >= NOW, _c.revision + 1), else_=NOW)
"""rules.next_revision as SQL."""


def this(key: ConversationKey) -> dict[str, object]:
    """The parameters of THIS."""
    return {
        "key_tenant": key.tenant,
        "key_model": key.model,
        "key_conversation_id": key.conversation_id,
    }


def engine_alive(
    worker_id: sa.ColumnElement[str],
    engine_id: sa.ColumnElement[str],
    epoch: sa.ColumnElement[str],
) -> sa.Exists:
    """Whether the worker holds a lease for this life of its engine."""
    return sa.exists().where(
        workers.c.worker_id == worker_id,
        workers.c.engine_id == engine_id,
        workers.c.epoch == epoch,
        workers.c.removed.is_(sa.false()),
        workers.c.lease_expire_us > NOW,
    )
