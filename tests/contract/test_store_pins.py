"""What every store does about pins that their worker renews."""

from __future__ import annotations

import pytest

from services.kvmeta.model import (
    EngineRef,
    HandleState,
    HeldPin,
    MissReason,
    PinStatus,
    PinVerdict,
    ReleaseCause,
)
from services.kvmeta.rules import EngineGone
from services.kvmeta.store import Swept, TtlNotHonoured
from tests.contract.kvmeta_stores import (
    ENGINE,
    SECOND,
    START_US,
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


async def ask(store, *pins: HeldPin, engine: EngineRef = ENGINE, worker_id: str = "d1"):
    return await store.check_pins(worker_id, engine, pins)


async def verdict(store, turn_id: str = "r1") -> PinVerdict:
    [status] = (await ask(store, held(turn_id))).statuses
    assert status.turn_id == turn_id
    found: PinVerdict = status.verdict
    return found


async def test_a_leased_handle_is_given_out_until_a_margin_before_its_lease_ends(
    store, clock
) -> None:
    await register(store)
    row = await stored(store, leased())
    assert row.drop_time_us == START_US + 60 * SECOND
    assert row.expire_time_us == START_US + 55 * SECOND
    clock.advance(55)
    assert (await miss(store)).reason is MissReason.EXPIRED
    assert await store.sweep(10) == Swept(expired=1)


async def test_a_confirmed_renewal_moves_the_deadline_and_goes_with_the_handle(
    store, clock
) -> None:
    await register(store)
    before = await stored(store, leased())
    clock.advance(20)
    checked = await ask(store, held(remaining=60, extension=20))
    assert (checked.renewed, checked.expired) == (1, 0)
    row = await store.get(key())
    assert row.drop_time_us == START_US + 80 * SECOND
    assert row.expire_time_us == START_US + 75 * SECOND
    assert row.revision > before.revision
    clock.advance(54)
    assert await store.sweep(10) == Swept()
    taken = await hit(store)
    assert taken.conversation.deadline_extension_us == 20 * SECOND
    assert taken.conversation.drop_time_us == START_US + 80 * SECOND


async def test_asking_without_a_renewal_changes_nothing(store, clock) -> None:
    await register(store)
    before = await stored(store, leased(num_tokens=70))
    clock.advance(20)
    checked = await ask(store, held(remaining=40))
    assert (checked.renewed, checked.expired) == (0, 0)
    assert checked.statuses == [
        PinStatus(
            "r1",
            PinVerdict.WANTED,
            key(),
            wanted_for_us=460 * SECOND,
            age_us=20 * SECOND,
            num_tokens=70,
        )
    ]
    assert await store.get(key()) == before


async def test_renewals_carry_a_handle_to_its_retention_and_not_beyond(store, clock) -> None:
    await register(store)
    await stored(store, leased())
    for extension in range(20, 480, 20):
        clock.advance(20)
        await ask(store, held(remaining=60, extension=extension))
    clock.advance(19)  # 479 s after the commit
    [status] = (await ask(store, held(remaining=41, extension=460))).statuses
    assert status.wanted_for_us == SECOND
    row = await store.get(key())
    assert row.expire_time_us == START_US + 480 * SECOND
    clock.advance(1)
    assert (await miss(store)).reason is MissReason.EXPIRED


async def test_renewed_handles_expire_in_the_order_of_their_moved_deadlines(store, clock) -> None:
    await register(store)
    for name in ("first", "second", "third"):
        await stored(store, leased(key(name), request_id=name))
        clock.advance(1)
    await ask(store, held("first", remaining=100, extension=43))
    await ask(store, held("second", remaining=80, extension=22))
    gone: list[str] = []
    while len(gone) < 3:
        clock.advance(1)
        await store.sweep(10)
        rows = await store.conversations("t", None, None, 10)
        names = [row.key.conversation_id for row in rows if row.state is HandleState.EXPIRED]
        gone += [name for name in names if name not in gone]
    assert gone == ["third", "second", "first"]


async def test_params_live_as_long_as_renewals_and_extensions_keep_the_handle(store, clock) -> None:
    await register(store)
    await stored(store, leased(params=b"p"))
    await store.extend(key(), 3600 * SECOND)
    for extension in range(50, 3000, 50):
        clock.advance(50)
        await ask(store, held(remaining=60, extension=extension))
        await store.forget_releases(10)
    assert (await hit(store)).params == b"p"


async def test_a_renewal_that_was_long_on_its_way_promises_no_more_than_the_engine(
    store, clock
) -> None:
    await register(store)
    await stored(store, leased())
    clock.advance(50)  # 60 s were left when the message was sent, 30 s ago
    await ask(store, held(remaining=60, extension=20))
    assert (await store.get(key())).drop_time_us == START_US + 80 * SECOND


async def test_a_commit_that_was_long_on_its_way_is_set_right_by_the_renewal(store, clock) -> None:
    await register(store)
    await stored(store, leased())  # sent 4 s ago: the engine's deadline is 56 s from now
    clock.advance(20)
    await ask(store, held(remaining=56, extension=20))
    assert (await store.get(key())).drop_time_us == START_US + 76 * SECOND


async def test_a_delayed_report_of_an_earlier_renewal_changes_nothing(store, clock) -> None:
    await register(store)
    await stored(store, leased())
    clock.advance(40)
    await ask(store, held(remaining=60, extension=40))
    row = await store.get(key())
    assert (await ask(store, held(remaining=60, extension=20))).renewed == 0
    assert await store.get(key()) == row


async def test_a_late_renewal_does_not_revive_an_expired_handle(store, clock) -> None:
    await register(store)
    await stored(store, leased())
    clock.advance(55)
    checked = await ask(store, held(remaining=60, extension=55))
    assert (checked.renewed, checked.expired) == (0, 1)
    assert checked.statuses[0].verdict is PinVerdict.RELEASE
    assert (await store.get(key())).state is HandleState.EXPIRED
    [release] = await store.releases("d1", 0, 10)
    assert release.cause is ReleaseCause.EXPIRED
    assert await store.sweep(10) == Swept()
    assert await verdict(store) is PinVerdict.RELEASE


async def test_a_late_renewal_touches_no_taken_or_spent_handle(store, clock) -> None:
    await register(store)
    await stored(store, leased())
    taken = (await hit(store)).conversation
    checked = await ask(store, held(extension=30))
    assert checked.statuses[0].verdict is PinVerdict.IN_USE
    assert await store.get(key()) == taken
    clock.advance(55)
    await store.sweep(10)
    spent = await store.get(key())
    assert spent.state is HandleState.SPENT
    assert await verdict(store) is PinVerdict.UNOWNED
    assert await store.get(key()) == spent


async def test_a_pin_without_renewal_keeps_its_deadline(store, clock) -> None:
    await register(store)
    before = await stored(store, commit())
    clock.advance(5)
    [status] = (await ask(store, held(remaining=600, extension=100))).statuses
    assert (status.verdict, status.wanted_for_us) == (PinVerdict.WANTED, 470 * SECOND)
    assert await store.get(key()) == before


async def test_the_pin_of_an_ended_conversation_is_to_be_released(store) -> None:
    await register(store)
    await stored(store, leased())
    await store.end(key())
    assert await verdict(store) is PinVerdict.RELEASE


async def test_a_pin_returned_after_the_end_was_never_read(store) -> None:
    await register(store)
    await stored(store, leased())
    await hit(store)
    await store.end(key())
    assert await verdict(store) is PinVerdict.IN_USE
    await store.give_back(key(), "handle-r1", "r2")
    assert await verdict(store) is PinVerdict.RELEASE


@pytest.mark.parametrize("given_out", [False, True])
async def test_a_void_pin_is_released_only_if_no_turn_had_it(store, given_out) -> None:
    lease_id = await register(store)
    await stored(store, leased())
    if given_out:
        await hit(store)
    await store.end_lease(lease_id)
    await register(store)  # the same life of the engine, under a new lease
    assert (await store.get(key())).state is HandleState.VOID
    expected = PinVerdict.UNOWNED if given_out else PinVerdict.RELEASE
    assert await verdict(store) is expected


async def test_a_superseded_or_unknown_pin_has_no_owner(store) -> None:
    await register(store)
    await stored(store, leased(turn=1))
    await stored(store, leased(turn=2, request_id="r2"))
    checked = await ask(store, held("r1"), held("r2"), held("unknown"))
    assert [status.verdict for status in checked.statuses] == [
        PinVerdict.UNOWNED,
        PinVerdict.WANTED,
        PinVerdict.UNOWNED,
    ]
    assert checked.statuses[0] == PinStatus("r1", PinVerdict.UNOWNED)


async def test_pins_of_another_worker_or_engine_life_have_no_owner(store) -> None:
    await register(store)
    other = EngineRef("engine-2", "epoch-1")
    await register(store, worker("d2", engine=other))
    await stored(store, leased(turn=1))
    [status] = (await ask(store, held(), engine=other, worker_id="d2")).statuses
    assert status.verdict is PinVerdict.UNOWNED
    assert await store.evict("d2", other, ["r1"]) == []
    assert await store.evict("d1", EngineRef("engine-1", "epoch-0"), ["r1"]) == []


async def test_a_turn_id_of_two_conversations_names_neither(store) -> None:
    await register(store)
    await stored(store, leased(key("a")))
    await stored(store, leased(key("b")))
    await hit(store, key("b"))
    assert await verdict(store) is PinVerdict.UNOWNED
    assert await store.evict("d1", ENGINE, ["r1"]) == []


@pytest.mark.parametrize("wrong", ["never registered", "other epoch", "lease ran out"])
async def test_pins_of_an_engine_that_is_gone_get_no_answer(store, clock, wrong) -> None:
    if wrong != "never registered":
        await register(store, lease_us=100)
    if wrong == "lease ran out":
        clock.us += 100
    engine = EngineRef("engine-1", "epoch-0" if wrong == "other epoch" else "epoch-1")
    assert await ask(store, held(), engine=engine) == EngineGone()
    assert await ask(store, engine=engine) == EngineGone()


async def test_many_pins_are_answered_in_the_order_of_the_question(store, clock) -> None:
    await register(store)
    names = [f"c-{number}" for number in range(25)]
    for name in names:
        await stored(store, leased(key(name), request_id=name))
    clock.advance(10)
    asked = sorted(names, reverse=True)
    checked = await ask(store, *(held(name, extension=10) for name in asked))
    assert checked.renewed == 25
    assert [status.key.conversation_id for status in checked.statuses] == asked
    rows = await store.conversations("t", None, None, 100)
    assert {row.drop_time_us for row in rows} == {START_US + 70 * SECOND}


async def test_a_new_commit_starts_from_its_own_deadline(store, clock) -> None:
    await register(store)
    await stored(store, leased())
    clock.advance(20)
    await ask(store, held(extension=20))
    taken = await hit(store)
    row = await stored(store, leased(turn=taken.turn, request_id="r2"))
    assert row.deadline_extension_us == 0
    assert row.drop_time_us == clock.us + 60 * SECOND
    assert row == await store.get(key())


async def test_a_returned_handle_can_be_renewed_again(store, clock) -> None:
    await register(store)
    await stored(store, leased())
    await hit(store)
    clock.advance(20)
    await store.give_back(key(), "handle-r1", "r2")
    assert (await ask(store, held(extension=20))).renewed == 1


async def test_a_conversation_may_outlive_the_engines_lease_by_its_own_ttl(store, clock) -> None:
    await register(store)
    await stored(store, leased())
    row = await store.extend(key(), 1200 * SECOND)
    assert row.expire_time_us == START_US + 55 * SECOND  # as far as the engine has confirmed
    clock.advance(20)
    [status] = (await ask(store, held(extension=20))).statuses
    assert status.wanted_for_us == 1180 * SECOND
    assert (await store.get(key())).expire_time_us == START_US + 75 * SECOND
    assert isinstance(await store.extend(key(), 3600 * SECOND + 1), TtlNotHonoured)
    await store.extend(key(), 3600 * SECOND)


async def test_a_shortened_ttl_ends_a_renewed_pin(store, clock) -> None:
    await register(store)
    await stored(store, leased())
    clock.advance(20)
    await ask(store, held(extension=20))
    row = await store.extend(key(), 30 * SECOND)
    assert row.expire_time_us == START_US + 30 * SECOND
    [status] = (await ask(store, held(remaining=60, extension=30))).statuses
    assert status.wanted_for_us == 10 * SECOND
    clock.advance(10)
    assert await verdict(store) is PinVerdict.RELEASE
