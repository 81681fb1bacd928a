"""Taking handles, inside a transaction: one guarded statement decides the race.

Statements are built once: building costs more than running them.
"""

from __future__ import annotations

import sqlalchemy as sa

from services.kvmeta import rules
from services.kvmeta.model import LIVE_STATES, ConversationKey, HandleState, MissReason
from services.kvmeta.rules import Policy
from services.kvmeta.sql.guards import NEXT_REVISION, NOW, REQUEST, THIS, engine_alive, this
from services.kvmeta.sql.tables import (
    CONVERSATION_COLUMNS,
    conversation_from_row,
    conversations,
)
from services.kvmeta.store import Hit, Miss

_c = conversations.c

# As text, because SQLAlchemy strips table names from what SQLite returns, also
# inside subqueries, where they are needed.
_RETURN_PARAMS = sa.literal_column(
    "(SELECT handle_params.params FROM handle_params"
    " WHERE handle_params.params_id = conversations.params_id)",
    sa.LargeBinary,
)
_RETURN_LEASE = sa.literal_column(
    "(SELECT workers.lease_expire_us FROM workers"
    " WHERE workers.worker_id = conversations.worker_id AND NOT workers.removed)",
    sa.BigInteger,
).label("lease_expire_us")
_RETURN_SAME_ENGINE = sa.literal_column(
    "(SELECT workers.engine_id = conversations.engine_id AND workers.epoch = conversations.epoch"
    " FROM workers WHERE workers.worker_id = conversations.worker_id)",
    sa.Boolean,
).label("same_engine")

_TAKE = (
    sa.update(conversations)
    .where(
        THIS,
        _c.state == HandleState.AVAILABLE.value,
        _c.expire_time_us > NOW,
        _c.commit_request_id != REQUEST,
        engine_alive(_c.worker_id, _c.engine_id, _c.epoch),
    )
    .values(
        state=HandleState.TAKEN.value,
        issued_turn=_c.issued_turn + 1,
        take_request_id=REQUEST,
        take_turn=_c.issued_turn + 1,
        revision=NEXT_REVISION,
    )
    .returning(*CONVERSATION_COLUMNS, _RETURN_PARAMS.label("params"))
)
_IS_REPEAT = sa.and_(
    _c.state == HandleState.TAKEN.value,
    _c.take_request_id == REQUEST,
    _c.expire_time_us > NOW,
)
_OPEN_TURN = (
    sa.update(conversations)
    .where(THIS)
    .values(
        issued_turn=sa.case((_IS_REPEAT, _c.issued_turn), else_=_c.issued_turn + 1),
        revision=sa.case((_IS_REPEAT, _c.revision), else_=NEXT_REVISION),
        due_time_us=sa.case(
            (_c.state.in_([state.value for state in LIVE_STATES]), _c.due_time_us),
            else_=NOW + sa.bindparam("dead_retention", type_=sa.BigInteger),
        ),
    )
    .returning(
        *CONVERSATION_COLUMNS,
        _RETURN_LEASE,
        _RETURN_SAME_ENGINE,
        sa.case((_IS_REPEAT, _RETURN_PARAMS)).label("params"),
    )
)


def take(
    connection: sa.Connection, key: ConversationKey, request_id: str, now_us: int, policy: Policy
) -> Hit | Miss:
    """See LedgerStore.take. Each of its two statements is a whole change."""
    asked = {**this(key), "by_request": request_id, "at_now": now_us}
    row = connection.execute(_TAKE, asked).one_or_none()
    if row is not None:
        conversation = conversation_from_row(row)
        return Hit(conversation.take_turn, conversation, row.params)
    asked["dead_retention"] = policy.dead_retention_us
    row = connection.execute(_OPEN_TURN, asked).one_or_none()
    if row is None:
        return Miss(rules.FIRST_TURN, MissReason.FIRST_TURN, "")
    conversation = conversation_from_row(row)
    if rules.is_repeated_take(conversation, request_id, now_us):
        return Hit(conversation.take_turn, conversation, row.params)
    worker_alive = (row.lease_expire_us or 0) > now_us
    same_life = worker_alive and bool(row.same_engine)
    return Miss(
        conversation.issued_turn,
        rules.miss_reason(conversation, request_id, now_us, engine_alive=same_life),
        conversation.worker_id if worker_alive else "",
    )
