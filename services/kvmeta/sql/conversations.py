"""Changes of one conversation other than takes, inside a transaction.

Each locks the row, lets rules.py decide, and writes what it says; on SQLite the
lock is the transaction itself. Only the usual commit, by the turn that holds the
handle, is a guarded statement.
"""

from __future__ import annotations

import sqlalchemy as sa

from services.kvmeta import rules
from services.kvmeta.deadlines import (
    Policy,
    committed_expire_us,
    longest_ttl_us,
    wanted_until_us,
)
from services.kvmeta.model import (
    Commit,
    Conversation,
    ConversationKey,
    HandleState,
    ReleaseCause,
)
from services.kvmeta.rules import CommitVerdict
from services.kvmeta.sql import releases
from services.kvmeta.sql.guards import NEXT_REVISION, REQUEST, THIS, engine_alive, this
from services.kvmeta.sql.prepared import Prepared
from services.kvmeta.sql.tables import (
    CONVERSATION_COLUMNS,
    conversation_from_row,
    conversation_to_row,
    conversations,
    handle_params,
    tenants,
)
from services.kvmeta.store import Ended, Position, TooManyConversations, TtlNotHonoured

_c = conversations.c
_READ = sa.select(*CONVERSATION_COLUMNS, _c.params_id).where(THIS)
_LOCK = _READ.with_for_update()
_UPDATE = sa.update(conversations).where(THIS)
_COMMITTER_ALIVE = engine_alive(
    sa.bindparam("by_worker", type_=sa.String),
    sa.bindparam("by_engine", type_=sa.String),
    sa.bindparam("by_epoch", type_=sa.String),
)
_IS_COMMITTER_ALIVE = sa.select(_COMMITTER_ALIVE)
_BY_TURN = sa.bindparam("by_turn", type_=sa.BigInteger)
# What rules.commit would say without looking at anything else.
_COMMIT_BY_HOLDER = (
    sa.update(conversations)
    .where(
        THIS,
        _c.state == HandleState.TAKEN.value,
        _c.take_request_id == REQUEST,
        _c.take_turn == _BY_TURN,
        _c.ended_turn < _BY_TURN,
        _c.conversation_ttl_us.is_(None),
        # Only what was due long ago has no params left to replace.
        sa.exists().where(handle_params.c.params_id == _c.params_id),
        _COMMITTER_ALIVE,
    )
    .values(
        state=HandleState.AVAILABLE.value,
        take_request_id="",
        take_turn=0,
        deadline_extension_us=0,
        commit_revision=NEXT_REVISION,
        revision=NEXT_REVISION,
        **{
            name: sa.bindparam(f"new_{name}", type_=_c[name].type)
            for name in (
                "turn",
                "handle_id",
                "worker_id",
                "engine_id",
                "epoch",
                "num_tokens",
                "num_blocks",
                "commit_request_id",
                "commit_time_us",
                "expire_time_us",
                "engine_ttl_us",
                "retention_ttl_us",
                "drop_time_us",
                "due_time_us",
            )
        },
    )
    .returning(*CONVERSATION_COLUMNS, _c.params_id)
)
# On SQLite, where the params follow in a statement of their own.
_COMMIT_BUT_PARAMS = Prepared(_COMMIT_BY_HOLDER)
_INSERT_PARAMS = sa.insert(handle_params).returning(handle_params.c.params_id)
_REPLACE_PARAMS = sa.update(handle_params).where(
    handle_params.c.params_id == sa.bindparam("key_params_id")
)
_AT_LEAST = sa.bindparam("at_least", type_=sa.BigInteger)
_KEEP_PARAMS = (
    sa.update(handle_params)
    .where(
        handle_params.c.params_id == sa.bindparam("key_params_id"),
        handle_params.c.due_time_us < _AT_LEAST,
    )
    .values(due_time_us=_AT_LEAST)
)
_stored = _COMMIT_BY_HOLDER.cte("stored")
_replaced = (
    sa.update(handle_params)
    .where(handle_params.c.params_id == _stored.c.params_id)
    .values(
        params=sa.bindparam("new_params", type_=sa.LargeBinary),
        due_time_us=sa.bindparam("new_params_due_time_us", type_=sa.BigInteger),
    )
    .cte("replaced")
)
_COMMIT_BY_HOLDER_WITH_PARAMS = sa.select(_stored).add_cte(_replaced)
_COUNT_ONE_MORE = (
    sa.update(tenants)
    .where(
        tenants.c.tenant == sa.bindparam("key_tenant"),
        tenants.c.conversations < sa.bindparam("at_most", type_=sa.BigInteger),
    )
    .values(conversations=tenants.c.conversations + 1)
)
_COUNT = sa.select(tenants.c.conversations).where(tenants.c.tenant == sa.bindparam("key_tenant"))


def commit(
    connection: sa.Connection, wanted: Commit, handle_id: str, now_us: int, policy: Policy
) -> CommitVerdict | TooManyConversations:
    """See LedgerStore.commit."""
    old, old_params_id = _lock(connection, wanted.key)
    alive = connection.execute(_IS_COMMITTER_ALIVE, _committer(wanted, now_us)).scalar_one()
    verdict = rules.commit(old, wanted, handle_id, now_us, policy, engine_alive=alive)
    if not isinstance(verdict, rules.Stored):
        return verdict
    if old is None and not _count_one_more(connection, wanted.key.tenant, policy):
        return TooManyConversations()
    if old is not None and verdict.release_old:
        releases.write(connection, [(old, old_params_id)], ReleaseCause.SUPERSEDED, now_us, policy)
    # Params of a handle that was given out are in nobody's release: reuse their row.
    reusable = old_params_id if old and old.state in rules.GIVEN_OUT else None
    due_time_us = _params_due_time_us(verdict.row, policy)
    params_id = _store_params(connection, wanted.params, due_time_us, reusable)
    if old is None:
        _insert(connection, verdict.row, params_id)
    else:
        _update(connection, verdict.row, params_id=params_id)
    return verdict


def commit_by_holder(
    connection: sa.Connection, wanted: Commit, handle_id: str, now_us: int, policy: Policy
) -> rules.Stored | None:
    """The usual commit, by the turn that holds the handle; None if it is any other.

    It says what `commit` would say. On PostgreSQL it is a single statement.
    """
    expire_time_us = committed_expire_us(wanted, None, now_us, policy)
    kept_for_us = max(wanted.engine_ttl_us, wanted.retention_ttl_us)
    params_due_time_us = releases.params_due_time_us(now_us + kept_for_us, policy)
    values = {
        **this(wanted.key),
        **_committer(wanted, now_us),
        "by_request": wanted.request_id,
        "by_turn": wanted.turn,
        "new_turn": wanted.turn,
        "new_handle_id": handle_id,
        "new_worker_id": wanted.worker_id,
        "new_engine_id": wanted.engine.engine_id,
        "new_epoch": wanted.engine.epoch,
        "new_num_tokens": wanted.num_tokens,
        "new_num_blocks": wanted.num_blocks,
        "new_commit_request_id": wanted.request_id,
        "new_commit_time_us": now_us,
        "new_expire_time_us": expire_time_us,
        "new_engine_ttl_us": wanted.engine_ttl_us,
        "new_retention_ttl_us": wanted.retention_ttl_us,
        "new_drop_time_us": now_us + wanted.engine_ttl_us,
        "new_due_time_us": expire_time_us,
    }
    if connection.dialect.name == "postgresql":
        values |= {"new_params": wanted.params, "new_params_due_time_us": params_due_time_us}
        row = connection.execute(_COMMIT_BY_HOLDER_WITH_PARAMS, values).one_or_none()
        return rules.Stored(conversation_from_row(row), release_old=False) if row else None
    returned = _COMMIT_BUT_PARAMS.one_or_none(connection, values)
    if returned is None:
        return None
    *_, params_id = returned
    replaced = {"params": wanted.params, "due_time_us": params_due_time_us}
    connection.execute(_REPLACE_PARAMS, {"key_params_id": params_id, **replaced})
    return rules.Stored(conversation_from_row(returned), release_old=False)


def _committer(wanted: Commit, now_us: int) -> dict[str, object]:
    return {
        "by_worker": wanted.worker_id,
        "by_engine": wanted.engine.engine_id,
        "by_epoch": wanted.engine.epoch,
        "at_now": now_us,
    }


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
    old, params_id = _lock(connection, key)
    if old is None or old.turn == 0:
        return None
    if ttl_us > longest_ttl_us(old, policy):
        return TtlNotHonoured(old)
    new = rules.extended(old, ttl_us, now_us, policy)
    _update(connection, new)
    due_time_us = _params_due_time_us(new, policy)
    connection.execute(_KEEP_PARAMS, {"key_params_id": params_id, "at_least": due_time_us})
    return new


def get(connection: sa.Connection, key: ConversationKey) -> Conversation | None:
    """See LedgerStore.get."""
    row = connection.execute(_READ, this(key)).one_or_none()
    return conversation_from_row(row) if row and row.turn > 0 else None


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
    return [conversation_from_row(row) for row in connection.execute(query)]


def _lock(
    connection: sa.Connection, key: ConversationKey
) -> tuple[Conversation | None, int | None]:
    row = connection.execute(_LOCK, this(key)).one_or_none()
    return (conversation_from_row(row), row.params_id) if row else (None, None)


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
    connection.execute(_UPDATE, {**this(new.key), **conversation_to_row(new), **more})


def _store_params(
    connection: sa.Connection, params: bytes, due_time_us: int, reusable_id: int | None
) -> int:
    values = {"params": params, "due_time_us": due_time_us}
    if reusable_id is not None:
        replaced = connection.execute(_REPLACE_PARAMS, {"key_params_id": reusable_id, **values})
        if replaced.rowcount == 1:
            return reusable_id
    params_id: int = connection.execute(_INSERT_PARAMS, values).scalar_one()
    return params_id


def _params_due_time_us(row: Conversation, policy: Policy) -> int:
    kept_until_us = max(
        row.drop_time_us,
        row.commit_time_us + row.retention_ttl_us,
        wanted_until_us(row, policy),
    )
    return releases.params_due_time_us(kept_until_us, policy)


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
