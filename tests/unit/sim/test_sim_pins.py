"""Pins end when they are read, released, or due, and their blocks come back once."""

from __future__ import annotations

import pytest

from services.sim.blocks import BlockPool, FreedReads
from services.sim.pins import Pin, PinTable


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(20, 16, FreedReads.NOISE)


def _pinned(pool: BlockPool, **deadlines: float | None) -> PinTable:
    table = PinTable(pool)
    for request_id, deadline in deadlines.items():
        table.add(Pin(request_id, pool.allocate(3) or [], deadline))
    return table


def test_the_first_notification_frees_and_the_second_is_counted(pool: BlockPool) -> None:
    table = _pinned(pool, a=100.0)
    assert table.notify("a", 1)
    assert pool.num_used == 0
    assert not table.notify("a", 1)
    assert table.unknown_notifications == 1


def test_an_earlier_deadline_behind_a_later_one_is_kept(pool: BlockPool) -> None:
    table = _pinned(pool, late=100.0, early=10.0)
    table.expire(50)
    assert [pin.request_id for pin in table.all(50)] == ["late"]
    assert table.expired == 1


def test_a_renewal_moves_a_deadline_but_never_back(pool: BlockPool) -> None:
    table = _pinned(pool, a=100.0)
    table.renew(["a", "unknown"], 150.0, now=10)
    table.renew(["a"], 120.0, now=20)
    assert table.next_deadline() == 150
    assert table.all(149) != []
    assert table.all(150) == []


def test_a_renewal_after_the_deadline_does_not_bring_a_pin_back(pool: BlockPool) -> None:
    table = _pinned(pool, a=100.0)
    table.renew(["a"], 200.0, now=100)
    assert table.all(100) == []


def test_a_release_frees_now_and_counts_as_expiry(pool: BlockPool) -> None:
    table = _pinned(pool, a=100.0, b=200.0)
    table.release(["a", "unknown"], now=5)
    assert [pin.request_id for pin in table.all(5)] == ["b"]
    assert table.expired == 1


def test_nothing_frees_a_pin_that_stock_lost_track_of(pool: BlockPool) -> None:
    table = _pinned(pool, lost=None)
    assert not table.notify("lost", 1)
    table.release(["lost"], 1)
    table.expire(1e9)
    assert pool.num_used == 3
    assert table.num_blocks() == 3
    assert table.next_deadline() is None
