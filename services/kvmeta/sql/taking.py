"""Taking handles, inside a transaction: one guarded statement decides the race.

Statements are built once: building costs more than running them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from services.kvmeta import rules
from services.kvmeta.deadlines import Policy
from services.kvmeta.model import LIVE_STATES, ConversationKey, HandleState, MissReason
from services.kvmeta.sql.guards import NEXT_REVISION, NOW, REQUEST, THIS, engine_alive, this
from services.kvmeta.sql.prepared import Prepared
from services.kvmeta.sql.tables import (
    CONVERSATION_COLUMNS,
    conversation_from_row,
    conversations,
)
from services.kvmeta.store import Hit, Miss

_c = conversations.c


class _Params(FunctionElement[bytes]):
    """The params of the row that a statement returns.

    A statement that has waited for another transaction returns the row as that
    transaction left it. PostgreSQL would still read other tables as they were
    before the wait: the params of an older handle, or none. Its function reads
    them as they are.
    """

    type = sa.LargeBinary()
    inherit_cache = True  # or the statements would be compiled at each use


# As text, because SQLAlchemy strips table names from what SQLite returns, also
# inside subqueries, where they are needed.
@compiles(_Params)
def _params_of_row(_element: _Params, _compiler: SQLCompiler, **_: object) -> str:
    return (
        "(SELECT handle_params.params FROM handle_params"
        " WHERE handle_params.params_id = conversations.params_id)"
    )


@compiles(_Params, "postgresql")
def _params_as_committed(_element: _Params, _compiler: SQLCompiler, **_: object) -> str:
    return "params_as_committed(conversations.params_id)"


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

# rules.may_take as SQL.
_MAY_TAKE = sa.and_(
    _c.state == HandleState.AVAILABLE.value,
    _c.expire_time_us > NOW,
    _c.commit_request_id != REQUEST,
    engine_alive(_c.worker_id, _c.engine_id, _c.epoch),
)
_TAKE = Prepared(
    sa.update(conversations)
    .where(THIS, _MAY_TAKE)
    .values(
        state=HandleState.TAKEN.value,
        issued_turn=_c.issued_turn + 1,
        take_request_id=REQUEST,
        take_turn=_c.issued_turn + 1,
        revision=NEXT_REVISION,
    )
    .returning(*CONVERSATION_COLUMNS, _Params().label("params"))
)
_IS_REPEAT = sa.and_(
    _c.state == HandleState.TAKEN.value,
    _c.take_request_id == REQUEST,
    _c.expire_time_us > NOW,
)
_OPEN_TURN = Prepared(
    sa.update(conversations)
    .where(THIS, sa.not_(_MAY_TAKE))
    .values(
        issued_turn=sa.case((_IS_REPEAT, _c.issued_turn), else_=_c.issued_turn + 1),
        revision=sa.case((_IS_REPEAT, _c.revision), else_=NEXT_REVISION),
        due_time_us=sa.case(
            (sa.or_(*(_c.state == state.value for state in LIVE_STATES)), _c.due_time_us),
            else_=NOW + sa.bindparam("dead_retention", type_=sa.BigInteger),
        ),
    )
    .returning(
        *CONVERSATION_COLUMNS,
        _RETURN_LEASE,
        _RETURN_SAME_ENGINE,
        sa.case((_IS_REPEAT, _Params())).label("params"),
    )
)
_EXISTS = Prepared(sa.select(_c.issued_turn).where(THIS))


def take(
    connection: sa.Connection, key: ConversationKey, request_id: str, now_us: int, policy: Policy
) -> Hit | Miss:
    """See LedgerStore.take. Each of its statements is a whole change."""
    asked = {**this(key), "by_request": request_id, "at_now": now_us}
    while True:
        row = _TAKE.one_or_none(connection, asked)
        if row is not None:
            *_, params = row
            conversation = conversation_from_row(row)
            return Hit(conversation.take_turn, conversation, params)
        # A first turn is what most misses are.
        if _EXISTS.one_or_none(connection, this(key)) is None:
            return Miss(rules.FIRST_TURN, MissReason.FIRST_TURN, "")
        row = _OPEN_TURN.one_or_none(
            connection, {**asked, "dead_retention": policy.dead_retention_us}
        )
        if row is not None:
            return _not_taken(row, request_id, now_us)
        # Between two of the statements a handle has come, or the conversation has gone.


def _not_taken(row: Sequence[Any], request_id: str, now_us: int) -> Hit | Miss:
    *_, lease_expire_us, same_engine, params = row
    conversation = conversation_from_row(row)
    if rules.is_repeated_take(conversation, request_id, now_us):
        return Hit(conversation.take_turn, conversation, params)
    worker_alive = (lease_expire_us or 0) > now_us
    same_life = worker_alive and bool(same_engine)
    return Miss(
        conversation.issued_turn,
        rules.miss_reason(conversation, request_id, now_us, engine_alive=same_life),
        conversation.worker_id if worker_alive else "",
    )
