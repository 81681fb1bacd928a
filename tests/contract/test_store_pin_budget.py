"""What every store does about evicting handles and listing pins."""

from __future__ import annotations

import pytest

from services.kvmeta.model import EngineRef, HandleState, MissReason, PinVerdict, ReleaseCause
from services.kvmeta.store import PinFilter, PinPosition
from tests.contract.kvmeta_stores import (
    ENGINE,
    SECOND,
    commit,
    held,
    hit,
    key,
    leased,
    miss,
    register,
    stored,
    worker,
)


async def test_evicted_handles_are_released_for_the_budget(store, clock) -> None:
    await register(store)
    await stored(store, leased(key("a"), request_id="a", params=b"p"))
    await stored(store, commit(key("b"), request_id="b"))
    await stored(store, leased(key("taken"), request_id="taken"))
    await hit(store, key("taken"))
    asked = ["b", "unknown", "taken", "a"]
    assert await store.evict("d1", ENGINE, asked) == ["b", "a"]
    assert await store.evict("d1", ENGINE, asked) == []
    assert (await store.get(key("a"))).state is HandleState.RELEASED
    assert (await store.get(key("taken"))).state is HandleState.TAKEN
    released = {each.handle.handle_id: each for each in await store.releases("d1", 0, 10)}
    assert set(released) == {"handle-a", "handle-b"}
    assert {each.cause for each in released.values()} == {ReleaseCause.BUDGET}
    assert released["handle-a"].handle.params == b"p"
    checked = await store.check_pins("d1", ENGINE, [held("a")])
    assert checked.statuses[0].verdict is PinVerdict.RELEASE


async def test_a_release_tells_how_far_its_pin_was_renewed(store, clock) -> None:
    await register(store)
    await stored(store, leased())
    clock.advance(20)
    await store.check_pins("d1", ENGINE, [held(extension=20)])
    await store.evict("d1", ENGINE, ["r1"])
    [release] = await store.releases("d1", 0, 10)
    assert release.handle.deadline_extension_us == 20 * SECOND


async def test_a_take_after_an_eviction_misses_as_evicted(store) -> None:
    await register(store)
    await stored(store, leased())
    await store.evict("d1", ENGINE, ["r1"])
    assert (await miss(store)).reason is MissReason.EVICTED
    opened = await miss(store, request_id="r3")
    assert opened.reason is MissReason.EVICTED
    await stored(store, leased(turn=opened.turn, request_id="r3"))
    await hit(store, request_id="r4")


async def test_the_end_of_an_evicted_conversation_is_what_counts(store) -> None:
    await register(store)
    await stored(store, leased())
    await store.evict("d1", ENGINE, ["r1"])
    await store.end(key())
    assert (await miss(store)).reason is MissReason.RELEASED


async def test_pins_are_listed_by_worker_then_oldest_first_in_pages(store, clock) -> None:
    other = EngineRef("engine-2", "epoch-1")
    await register(store, worker(kv_block_bytes=4096))
    await register(store, worker("d2", engine=other))
    for number in range(5):
        clock.us += number % 2  # some are committed in the same microsecond
        await stored(store, leased(key(f"c-{number}"), request_id=f"c-{number}"))
    await stored(
        store,
        leased(key("z", tenant="u", model="n"), request_id="z", worker_id="d2", engine=other),
    )
    await hit(store, key("c-1"))
    await stored(store, leased(key("gone"), request_id="gone"))
    await store.end(key("gone"))
    listed = await store.pins(PinFilter(), None, 100)
    names = [pin.conversation.key.conversation_id for pin in listed]
    assert names == ["c-0", "c-1", "c-2", "c-3", "c-4", "z"]
    assert [pin.kv_block_bytes for pin in listed] == [4096] * 5 + [0]
    assert [pin.conversation for pin in listed][1] == await store.get(key("c-1"))
    paged, after = [], None
    while page := await store.pins(PinFilter(), after, 2):
        paged += page
        last = page[-1].conversation
        after = PinPosition(last.worker_id, last.commit_time_us, last.key)
    assert paged == listed


@pytest.mark.parametrize(
    ("which", "expected"),
    [
        (PinFilter(worker_id="d2"), ["b"]),
        (PinFilter(tenant="t"), ["a"]),
        (PinFilter(model="n"), ["b"]),
        (PinFilter(worker_id="d1", tenant="u"), []),
    ],
)
async def test_pins_are_listed_by_worker_tenant_and_model(store, which, expected) -> None:
    other = EngineRef("engine-2", "epoch-1")
    await register(store)
    await register(store, worker("d2", engine=other))
    await stored(store, leased(key("a")))
    there = key("b", tenant="u", model="n")
    await stored(store, leased(there, request_id="b", worker_id="d2", engine=other))
    listed = await store.pins(which, None, 10)
    assert [pin.conversation.key.conversation_id for pin in listed] == expected


async def test_blocks_that_the_engine_has_dropped_are_no_pins(store, clock) -> None:
    await register(store)
    await stored(store, leased())
    clock.advance(60)
    assert await store.pins(PinFilter(), None, 10) == []
