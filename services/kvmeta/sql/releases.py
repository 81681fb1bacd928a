"""The log of releases, inside a transaction."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from services.kvmeta.deadlines import Policy
from services.kvmeta.model import Conversation, Release, ReleaseCause
from services.kvmeta.sql.tables import (
    RELEASES_COUNTER,
    counters,
    handle_params,
    release_floors,
    release_from_row,
    releases,
)
from services.kvmeta.store import Forgotten

_COUNT_UP = (
    sa.update(counters)
    .where(counters.c.name == sa.bindparam("key_name"))
    .values(value=counters.c.value + sa.bindparam("more", type_=sa.BigInteger))
    .returning(counters.c.value)
)
_COUNTER = sa.select(counters.c.value).where(counters.c.name == sa.bindparam("key_name"))
_AT_LEAST = sa.bindparam("at_least", type_=sa.BigInteger)
_RAISE_ALL = sa.update(counters).where(counters.c.value < _AT_LEAST).values(value=_AT_LEAST)
_FLOOR = sa.select(release_floors.c.revision).where(
    release_floors.c.worker_id == sa.bindparam("of_worker")
)
_AFTER = (
    sa.select(releases, handle_params.c.params)
    .join(handle_params, handle_params.c.params_id == releases.c.params_id)
    .where(
        releases.c.worker_id == sa.bindparam("of_worker"),
        releases.c.revision > sa.bindparam("after_revision", type_=sa.BigInteger),
    )
    .order_by(releases.c.revision)
    .limit(sa.bindparam("at_most", type_=sa.Integer))
)


def params_due_time_us(kept_until_us: int, policy: Policy) -> int:
    """When a handle's params may be deleted: well after any release of it.

    Args:
        kept_until_us: when the engine drops the blocks, renewals included.
        policy: gives the retention.
    """
    return kept_until_us + 2 * policy.release_retention_us


def next_revisions(connection: sa.Connection, counter: str, count: int) -> int:
    """Reserve `count` revisions; the first of them.

    The counter's row stays locked until the transaction is committed. Call it
    last, so that few others wait, and always after rows of other tables.
    """
    last: int = connection.execute(_COUNT_UP, {"key_name": counter, "more": count}).scalar_one()
    return last - count + 1


def current_revision(connection: sa.Connection, counter: str) -> int:
    """The last revision given out and committed."""
    value: int = connection.execute(_COUNTER, {"key_name": counter}).scalar_one()
    return value


def start_revisions(connection: sa.Connection, at_least: int) -> None:
    """Let the revisions of a new database go on from a time.

    Watchers of the database that was here before then find their position below
    everything, instead of resuming in the middle of another history.
    """
    connection.execute(_RAISE_ALL, {"at_least": at_least})


def write(
    connection: sa.Connection,
    unwanted: Sequence[tuple[Conversation, int | None]],
    cause: ReleaseCause,
    now_us: int,
    policy: Policy,
) -> None:
    """Log a release for each conversation's handle, if its engine still holds it.

    Args:
        connection: inside the transaction that makes the handles unusable.
        unwanted: conversations as they were, with the ids of their params.
        cause: why the blocks are no longer wanted.
        now_us: the ledger's time.
        policy: gives the retention.
    """
    held = [pair for pair in unwanted if pair[0].drop_time_us > now_us]
    if not held:
        return
    first = next_revisions(connection, RELEASES_COUNTER, len(held))
    connection.execute(
        sa.insert(releases),
        [
            {
                "revision": first + index,
                "worker_id": row.worker_id,
                "engine_id": row.engine.engine_id,
                "epoch": row.engine.epoch,
                "handle_id": row.handle_id,
                "turn": row.turn,
                "params_id": params_id,
                "num_tokens": row.num_tokens,
                "num_blocks": row.num_blocks,
                "cause": cause.value,
                "deadline_extension_us": row.deadline_extension_us,
                "due_time_us": row.drop_time_us + policy.release_retention_us,
            }
            for index, (row, params_id) in enumerate(held)
        ],
    )


def after(
    connection: sa.Connection, worker_id: str, after_revision: int, limit: int
) -> list[Release] | Forgotten:
    """See LedgerStore.releases."""
    if after_revision > 0:
        if after_revision > current_revision(connection, RELEASES_COUNTER):
            return Forgotten()
        floor = connection.execute(_FLOOR, {"of_worker": worker_id}).scalar_one_or_none()
        if floor is not None and after_revision < floor:
            return Forgotten()
    rows = connection.execute(
        _AFTER, {"of_worker": worker_id, "after_revision": after_revision, "at_most": limit}
    )
    return [release_from_row(row) for row in rows.mappings()]
