"""Another tenant's conversation answers as one that does not exist, at the same cost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import sqlalchemy as sa
from sqlalchemy import event

from services.kvmeta.sql.prepared import Prepared
from services.kvmeta.sql.store import SqlStore
from services.kvmeta.store import Ended, PinFilter
from tests.contract.kvmeta_stores import SECOND, commit, hit, key, miss, register, stored

THEIRS = key("theirs", tenant="t")
FOREIGN = key("theirs", tenant="u")
UNKNOWN = key("nobody's", tenant="u")

CALLS = {
    "take": lambda store, at: store.take(at, "guess"),
    "return": lambda store, at: store.give_back(at, "handle-r1", "r2"),
    "extend": lambda store, at: store.extend(at, 60 * SECOND),
    "get": lambda store, at: store.get(at),
    "end": lambda store, at: store.end(at),
}


@contextmanager
def statements() -> Iterator[list[str]]:
    """Every SQL statement sent meanwhile, by any engine."""
    sent: list[str] = []

    def note(_connection, _cursor, statement, *_) -> None:
        sent.append(statement)

    prepared = Prepared.one_or_none

    def note_prepared(self: Prepared, connection: sa.Connection, parameters: Any) -> Any:
        if connection.dialect.name == "sqlite":  # whose driver gets it without SQLAlchemy
            sent.append(str(self.statement))
        return prepared(self, connection, parameters)

    event.listen(sa.Engine, "before_cursor_execute", note)
    try:
        with patch.object(Prepared, "one_or_none", note_prepared):
            yield sent
    finally:
        event.remove(sa.Engine, "before_cursor_execute", note)


@pytest.mark.parametrize("call", CALLS)
async def test_a_foreign_conversation_is_as_unknown_as_none(store, call) -> None:
    await register(store)
    await stored(store, commit(THEIRS))
    await store.end(key("own", tenant="u"))  # a tenant that is known
    answers, costs = [], []
    for at in (FOREIGN, UNKNOWN):
        with statements() as sent:
            answers.append(await CALLS[call](store, at))
        costs.append(sent)
    assert answers[0] == answers[1]
    assert costs[0] == costs[1]
    assert bool(costs[0]) == isinstance(store, SqlStore)
    await hit(store, THEIRS)


async def test_a_held_handle_cannot_be_returned_by_another_tenant(store) -> None:
    await register(store)
    await stored(store, commit(THEIRS))
    taken = (await hit(store, THEIRS)).conversation
    assert await store.give_back(FOREIGN, taken.handle_id, taken.take_request_id) is None
    assert await store.get(THEIRS) == taken


async def test_ending_and_committing_under_one_tenant_leaves_the_other_alone(store) -> None:
    await register(store)
    row = await stored(store, commit(THEIRS))
    assert await store.end(FOREIGN) == Ended(found=False, released=False)
    opened = await miss(store, FOREIGN)
    mine = await stored(store, commit(FOREIGN, turn=opened.turn, request_id="mine"))
    assert await store.get(THEIRS) == row
    assert await store.conversations("u", None, None, 10) == [mine]
    pins = await store.pins(PinFilter(tenant="u"), None, 10)
    assert [pin.conversation for pin in pins] == [mine]
