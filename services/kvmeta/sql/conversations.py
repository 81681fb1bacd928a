"""Changes of one conversation, inside a transaction.

TakeHandle is one guarded statement. The others lock the row, let rules.py
decide, and write what it says; on SQLite the lock is the transaction itself.
Statements are built once: building costs more than running them.
"""

from __future__ import annotations

import sqlalchemy as sa

from services.kvmeta import rules
from services.kvmeta.model import (
    LIVE_STATES,
    Commit,
    Conversation,
    ConversationKey,
    HandleState,
    MissReason,
    ReleaseCause,
)
from services.kvmeta.rules import CommitVerdict, Policy
from services.kvmeta.sql import releases
from services.kvmeta.sql.tables import (
    CONVERSATION_COLUMNS,
    conversation_from_row,
    conversation_to_row,
    conversations,
    handle_params,
    tenants,
    workers,
)
from services.kvmeta.store import (
    Ended,
    Hit,
    Miss,
    Position,
    TooManyConversations,
    TtlNotHonoured,
)

_c = conversations.c
_NOW = sa.bindparam("at_now", type_=sa.BigInteger)
_REQUEST = sa.bindparam("by_request", type_=sa.String)
_THIS = sa.and_(
    _c.tenant == sa.bindparam("key_tenant"),
    _c.model == sa.bindparam("key_model"),
    _c.conversation_id == sa.bindparam("key_conversation_id"),
)


def _engine_alive(
    worker_id: sa.ColumnElement[str],
    engine_id: sa.ColumnElement[str],
    epoch: sa.ColumnElement[str],
) -> sa.Exists:
    return sa.exists().where(
        workers.c.worker_id == worker_id,
        workers.c.engine_id == engine_id,
        workers.c.epoch == epoch,
        workers.c.removed.is_(sa.false()),
        workers.c.lease_expire_us > _NOW,
    )


_HOLDER_ALIVE = _engine_alive(_c.worker_id, _c.engine_id, _c.epoch)

# As text, because SQLAlchemy strips table names from what SQLite returns, also
# inside subqueries, where they are needed.
_RETURN_PARAMS = sa.literal_column(
    "(SELECT handle_params.params FROM handle_params"
    " WHERE handle_params.params_id = conversations.params_id)",
    sa.LargeBinary,
).label("params")
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
_NEXT_REVISION = sa.case((_c.revision >= _NOW, _c.revision + 1), else_=_NOW)

_TAKE = (
    sa.update(conversations)
    .where(
        _THIS,
        _c.state == HandleState.AVAILABLE.value,
        _c.expire_time_us > _NOW,
        _c.commit_request_id != _REQUEST,
        _HOLDER_ALIVE,
    )
    .values(
        state=HandleState.TAKEN.value,
        issued_turn=_c.issued_turn + 1,
        take_request_id=_REQUEST,
        take_turn=_c.issued_turn + 1,
        revision=_NEXT_REVISION,
    )
    .returning(*CONVERSATION_COLUMNS, _RETURN_PARAMS)
)
_IS_REPEAT = sa.and_(
    _c.state == HandleState.TAKEN.value,
    _c.take_request_id == _REQUEST,
    _c.expire_time_us > _NOW,
)
_OPEN_TURN = (
    sa.update(conversations)
    .where(_THIS)
    .values(
        issued_turn=sa.case((_IS_REPEAT, _c.issued_turn), else_=_c.issued_turn + 1),
        revision=sa.case((_IS_REPEAT, _c.revision), else_=_NEXT_REVISION),
        due_time_us=sa.case(
            (_c.state.in_([state.value for state in LIVE_STATES]), _c.due_time_us),
            else_=_NOW + sa.bindparam("dead_retention", type_=sa.BigInteger),
        ),
    )
    .returning(*CONVERSATION_COLUMNS, _RETURN_LEASE, _RETURN_SAME_ENGINE)
)
_READ_PARAMS = (
    sa.select(handle_params.c.params)
    .join(conversations, _c.params_id == handle_params.c.params_id)
    .where(_THIS)
)
_READ = sa.select(*CONVERSATION_COLUMNS, _c.params_id).where(_THIS)
_LOCK = _READ.with_for_update()
_UPDATE = sa.update(conversations).where(_THIS)
_COMMITTER_ALIVE = sa.select(
    _engine_alive(
        sa.bindparam("by_worker", type_=sa.String),
        sa.bindparam("by_engine", type_=sa.String),
        sa.bindparam("by_epoch", type_=sa.String),
    )
)
_INSERT_PARAMS = sa.insert(handle_params).returning(handle_params.c.params_id)
_REPLACE_PARAMS = sa.update(handle_params).where(
    handle_params.c.params_id == sa.bindparam("key_params_id")
)
_COUNT_ONE_MORE = (
    sa.update(tenants)
    .where(
        tenants.c.tenant == sa.bindparam("key_tenant"),
        tenants.c.conversations < sa.bindparam("at_most", type_=sa.BigInteger),
    )
    .values(conversations=tenants.c.conversations + 1)
)
_COUNT = sa.select(tenants.c.conversations).where(tenants.c.tenant == sa.bindparam("key_tenant"))


def _this(key: ConversationKey) -> dict[str, object]:
    return {
        "key_tenant": key.tenant,
        "key_model": key.model,
        "key_conversation_id": key.conversation_id,
    }


def take(
    connection: sa.Connection, key: ConversationKey, request_id: str, now_us: int, policy: Policy
) -> Hit | Miss:
    """See LedgerStore.take."""
    asked = {**_this(key), "by_request": request_id, "at_now": now_us}
    row = connection.execute(_TAKE, asked).mappings().one_or_none()
    if row is not None:
        return Hit(row["take_turn"], conversation_from_row(row), row["params"])
    asked["dead_retention"] = policy.dead_retention_us
    row = connection.execute(_OPEN_TURN, asked).mappings().one_or_none()
    if row is None:
        return Miss(rules.FIRST_TURN, MissReason.FIRST_TURN, "")
    conversation = conversation_from_row(row)
    if rules.is_repeated_take(conversation, request_id, now_us):
        params = connection.execute(_READ_PARAMS, _this(key)).scalar_one()
        return Hit(conversation.take_turn, conversation, params)
    worker_alive = (row["lease_expire_us"] or 0) > now_us
    engine_alive = worker_alive and bool(row["same_engine"])
    return Miss(
        conversation.issued_turn,
        rules.miss_reason(conversation, request_id, now_us, engine_alive=engine_alive),
        conversation.worker_id if worker_alive else "",
    )


def commit(
    connection: sa.Connection, wanted: Commit, handle_id: str, now_us: int, policy: Policy
) -> CommitVerdict | TooManyConversations:
    """See LedgerStore.commit."""
    old, old_params_id = _lock(connection, wanted.key)
    alive = connection.execute(
        _COMMITTER_ALIVE,
        {
            "by_worker": wanted.worker_id,
            "by_engine": wanted.engine.engine_id,
            "by_epoch": wanted.engine.epoch,
            "at_now": now_us,
        },
    ).scalar_one()
    verdict = rules.commit(old, wanted, handle_id, now_us, policy, engine_alive=alive)
    if not isinstance(verdict, rules.Stored):
        return verdict
    if old is None and not _count_one_more(connection, wanted.key.tenant, policy):
        return TooManyConversations()
    if old is not None and verdict.release_old:
        releases.write(connection, [(old, old_params_id)], ReleaseCause.SUPERSEDED, now_us, policy)
    # Params of a handle that was given out are in nobody's release: reuse their row.
    reusable = old_params_id if old and old.state in rules.GIVEN_OUT else None
    params = {
        "params": wanted.params,
        "due_time_us": releases.params_due_time_us(verdict.row, policy),
    }
    params_id = _store_params(connection, params, reusable)
    if old is None:
        _insert(connection, verdict.row, params_id)
    else:
        _update(connection, verdict.row, params_id=params_id)
    return verdict


def give_back(
    connection: sa.Connection,
    key: ConversationKey,
    handle_id: str,
    request_id: str,
    now_us: int,
    policy: Policy,
) -> int | None:
    """See LedgerStore.give_back."""
    old, params_id = _lock(connection, key)
    new = rules.returned(old, handle_id, request_id, now_us, policy)
    if old is None or new is None:
        return None
    _update(connection, new)
    if new.state is HandleState.RELEASED:
        releases.write(connection, [(old, params_id)], ReleaseCause.ENDED, now_us, policy)
    return new.revision


def end(connection: sa.Connection, key: ConversationKey, now_us: int, policy: Policy) -> Ended:
    """See LedgerStore.end."""
    old, params_id = _lock(connection, key)
    if old is None:
        if _count_one_more(connection, key.tenant, policy):
            _insert(connection, rules.ended_before_first_turn(key, now_us, policy), None)
        return Ended(found=False, released=False)
    new = rules.ended(old, now_us, policy)
    _update(connection, new)
    released = old.state is HandleState.AVAILABLE
    if released:
        releases.write(connection, [(old, params_id)], ReleaseCause.ENDED, now_us, policy)
    return Ended(found=old.turn > 0, released=released)


def extend(
    connection: sa.Connection, key: ConversationKey, ttl_us: int, now_us: int, policy: Policy
) -> Conversation | TtlNotHonoured | None:
    """See LedgerStore.extend."""
    old, _ = _lock(connection, key)
    if old is None or old.turn == 0:
        return None
    if ttl_us > rules.longest_ttl_us(old.engine_ttl_us, policy):
        return TtlNotHonoured(old.engine_ttl_us)
    new = rules.extended(old, ttl_us, now_us)
    _update(connection, new)
    return new


def get(connection: sa.Connection, key: ConversationKey) -> Conversation | None:
    """See LedgerStore.get."""
    row = connection.execute(_READ, _this(key)).mappings().one_or_none()
    return conversation_from_row(row) if row and row["turn"] > 0 else None


def page(
    connection: sa.Connection, tenant: str, model: str | None, after: Position | None, limit: int
) -> list[Conversation]:
    """See LedgerStore.conversations."""
    query = sa.select(*CONVERSATION_COLUMNS).where(_c.tenant == tenant, _c.turn > 0)
    if model is not None:
        query = query.where(_c.model == model)
    if after is not None:
        query = query.where(
            _c.commit_time_us <= after.commit_time_us,
            sa.or_(
                _c.commit_time_us < after.commit_time_us,
                sa.tuple_(_c.model, _c.conversation_id)
                > sa.tuple_(sa.literal(after.model), sa.literal(after.conversation_id)),
            ),
        )
    query = query.order_by(_c.commit_time_us.desc(), _c.model, _c.conversation_id).limit(limit)
    return [conversation_from_row(row) for row in connection.execute(query).mappings()]


def _lock(
    connection: sa.Connection, key: ConversationKey
) -> tuple[Conversation | None, int | None]:
    row = connection.execute(_LOCK, _this(key)).mappings().one_or_none()
    return (conversation_from_row(row), row["params_id"]) if row else (None, None)


def _insert(connection: sa.Connection, new: Conversation, params_id: int | None) -> None:
    key = {
        "tenant": new.key.tenant,
        "model": new.key.model,
        "conversation_id": new.key.conversation_id,
    }
    connection.execute(
        sa.insert(conversations), {**key, **conversation_to_row(new), "params_id": params_id}
    )


def _update(connection: sa.Connection, new: Conversation, **more: int | None) -> None:
    connection.execute(_UPDATE, {**_this(new.key), **conversation_to_row(new), **more})


def _store_params(
    connection: sa.Connection, params: dict[str, object], reusable_id: int | None
) -> int:
    if reusable_id is not None:
        replaced = connection.execute(_REPLACE_PARAMS, {"key_params_id": reusable_id, **params})
        if replaced.rowcount == 1:
            return reusable_id
    params_id: int = connection.execute(_INSERT_PARAMS, params).scalar_one()
    return params_id


def _count_one_more(connection: sa.Connection, tenant: str, policy: Policy) -> bool:
    """Count a new conversation against the tenant's limit; False if it is reached."""
    which = {"key_tenant": tenant}
    limit = policy.max_conversations
    while connection.execute(_COUNT_ONE_MORE, {**which, "at_most": limit}).rowcount == 0:
        count = connection.execute(_COUNT, which).scalar_one_or_none()
        if count is None:
            connection.execute(sa.insert(tenants), {"tenant": tenant, "conversations": 1})
            return True
        if count >= limit:
            return False
        # Another replica has changed the count just now.
    return True
