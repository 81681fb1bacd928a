"""The ledger's RPCs about pins answer as the proto says."""

from __future__ import annotations

import pytest

from kvloop.common.v1 import common_pb2
from kvloop.errors import InvalidFieldError, PreconditionError
from kvloop.kvmeta.v1 import ledger_pb2
from kvloop.rpc import typed_errors
from tests.contract.kvmeta_stores import START_US
from tests.unit.kvmeta.messages import commit, conversation, engine, register, seconds, take

Verdict = ledger_pb2.PinStatus.Verdict
Cause = ledger_pb2.WatchReleasesResponse.Cause


@pytest.fixture
async def ledger(served):
    """The ledger, with worker d1 registered."""
    request = register(ttl=300)
    request.worker.traits.pin_lease.CopyFrom(seconds(60))
    await served.registry.RegisterWorker(request)
    return served.ledger


def leased(name: str = "c", request_id: str = "r1", turn: int = 0):
    request = commit(name, request_id, turn)
    request.engine_ttl.CopyFrom(seconds(60))
    request.retention_ttl.CopyFrom(seconds(480))
    return request


def pin(turn_id: str = "r1", remaining: float = 60, extension: float = 0):
    return ledger_pb2.HeldPin(
        turn_id=turn_id,
        engine_remaining=seconds(remaining),
        deadline_extension=seconds(extension),
    )


def renew(*pins: ledger_pb2.HeldPin):
    return ledger_pb2.RenewPinsRequest(worker_id="d1", engine=engine(), pins=pins)


def evict(*turn_ids: str):
    return ledger_pb2.EvictHandlesRequest(worker_id="d1", engine=engine(), turn_ids=turn_ids)


async def test_a_renewable_commit_is_granted_what_renewals_can_reach(ledger, clock) -> None:
    assert (await ledger.CommitTurn(leased())).granted_ttl == seconds(480)
    clock.advance(20)
    found = await ledger.GetConversation(ledger_pb2.GetConversationRequest(key=conversation()))
    assert found.conversation.renewable
    assert found.conversation.remaining_ttl == seconds(460)
    assert found.conversation.expire_time.ToMicroseconds() == START_US + 480_000_000
    clock.advance(35)  # nobody has renewed
    found = await ledger.GetConversation(ledger_pb2.GetConversationRequest(key=conversation()))
    assert found.conversation.remaining_ttl == seconds(0)


async def test_a_pin_is_renewed_in_two_calls_and_taken_with_its_extension(ledger, clock) -> None:
    await ledger.CommitTurn(leased())
    clock.advance(20)
    [status] = (await ledger.RenewPins(renew(pin(remaining=40)))).pins
    assert status == ledger_pb2.PinStatus(
        turn_id="r1",
        verdict=Verdict.VERDICT_WANTED,
        wanted_for=seconds(460),
        key=conversation(),
        age=seconds(20),
        num_tokens=64,
    )
    await ledger.RenewPins(renew(pin(remaining=60, extension=20)))
    clock.advance(50)
    taken = await ledger.TakeHandle(take())
    assert taken.handle.deadline_extension == seconds(20)
    assert taken.remaining_ttl == seconds(5)
    [status] = (await ledger.RenewPins(renew(pin()))).pins
    assert status.verdict == Verdict.VERDICT_IN_USE
    assert not status.HasField("wanted_for")


async def test_a_pin_that_nobody_owns_says_nothing_else(ledger) -> None:
    [status] = (await ledger.RenewPins(renew(pin("unknown")))).pins
    assert status == ledger_pb2.PinStatus(turn_id="unknown", verdict=Verdict.VERDICT_UNOWNED)


async def test_a_worker_without_pins_is_told_that_it_is_known(ledger) -> None:
    assert list((await ledger.RenewPins(renew())).pins) == []


async def test_pins_of_an_engine_that_is_gone_are_refused(ledger) -> None:
    for request in (renew(), renew(pin())):
        request.engine.epoch = "epoch-0"
        with pytest.raises(PreconditionError) as caught, typed_errors():
            await ledger.RenewPins(request)
        assert caught.value.reason == "ENGINE_GONE"


async def test_more_pins_than_one_transaction_takes_are_all_answered(ledger) -> None:
    for number in range(3):
        await ledger.CommitTurn(leased(f"c-{number}", f"r-{number}"))
    asked = [pin(f"r-{number}", remaining=80, extension=20) for number in range(1203)]
    statuses = (await ledger.RenewPins(renew(*asked))).pins
    assert [status.turn_id for status in statuses] == [each.turn_id for each in asked]
    wanted = [each.turn_id for each in statuses if each.verdict == Verdict.VERDICT_WANTED]
    assert wanted == ["r-0", "r-1", "r-2"]


async def test_a_conversation_with_a_renewable_pin_may_live_longer_than_its_lease(
    ledger, clock
) -> None:
    await ledger.CommitTurn(leased())
    clock.advance(10)
    request = ledger_pb2.ExtendConversationRequest(key=conversation(), ttl=seconds(1200))
    assert (await ledger.ExtendConversation(request)).granted_ttl == seconds(1190)
    request.ttl.CopyFrom(seconds(3601))
    with pytest.raises(PreconditionError, match=r"3601 s.*3600 s") as caught, typed_errors():
        await ledger.ExtendConversation(request)
    assert caught.value.reason == "TTL_NOT_HONOURED"


async def test_eviction_names_what_may_be_freed_and_wakes_the_watcher(ledger) -> None:
    await ledger.CommitTurn(leased("a", "a"))
    await ledger.CommitTurn(leased("b", "b"))
    watch = ledger.WatchReleases(ledger_pb2.WatchReleasesRequest(worker_id="d1"))
    for turn in (1, 2):  # its first message shows that it is watching
        await ledger.CommitTurn(leased("other", f"other-{turn}", turn))
    await anext(aiter(watch))
    await ledger.TakeHandle(take("b"))
    response = await ledger.EvictHandles(evict("b", "a", "a", "unknown"))
    assert list(response.evicted_turn_ids) == ["a"]
    release = await anext(aiter(watch))  # rung, not polled
    assert (release.cause, release.handle.worker_id) == (Cause.CAUSE_BUDGET, "d1")
    watch.cancel()
    missed = await ledger.TakeHandle(take("a", "later"))
    assert missed.miss_reason == common_pb2.MISS_REASON_EVICTED


async def test_pins_are_listed_with_owner_age_and_size(ledger, clock) -> None:
    await ledger.CommitTurn(leased())
    clock.advance(20)
    await ledger.RenewPins(renew(pin(remaining=60, extension=20)))
    await ledger.TakeHandle(take())
    clock.advance(1)
    [found] = (await ledger.ListPins(ledger_pb2.ListPinsRequest(worker_id="d1"))).pins
    assert found.conversation.key == conversation()
    assert found.conversation.state == ledger_pb2.Conversation.STATE_TAKEN
    assert (found.age, found.engine_remaining) == (seconds(21), seconds(59))
    assert found.num_bytes == 2 * 4096


async def test_pins_are_paged_for_their_own_query_only(ledger) -> None:
    for number in range(3):
        await ledger.CommitTurn(leased(f"c-{number}", f"r-{number}"))
    names, token = [], ""
    for _ in range(2):
        page = await ledger.ListPins(
            ledger_pb2.ListPinsRequest(tenant="t", page_size=2, page_token=token)
        )
        names += [found.conversation.key.conversation_id for found in page.pins]
        first, token = token, page.next_page_token
        if not first:
            with pytest.raises(InvalidFieldError) as caught, typed_errors():
                await ledger.ListPins(ledger_pb2.ListPinsRequest(model="m", page_token=token))
            assert caught.value.field == "page_token"
    assert (names, token) == (["c-0", "c-1", "c-2"], "")


async def test_verdicts_renewals_and_evictions_are_counted(ledger, served, clock) -> None:
    await ledger.CommitTurn(leased())
    await ledger.RenewPins(renew(pin(extension=5), pin("unknown"), pin("unknown-2")))
    await ledger.EvictHandles(evict("r1"))
    await ledger.CommitTurn(leased("old", "old"))
    clock.advance(55)
    await ledger.RenewPins(renew(pin("old")))
    count = served.kvmeta.metrics.registry.get_sample_value
    assert count("kvloop_kvmeta_pins_total", {"verdict": "wanted"}) == 1
    assert count("kvloop_kvmeta_pins_total", {"verdict": "unowned"}) == 2
    assert count("kvloop_kvmeta_pins_total", {"verdict": "release"}) == 1
    assert count("kvloop_kvmeta_renewed_handles_total") == 1
    assert count("kvloop_kvmeta_evicted_handles_total") == 1
    assert count("kvloop_kvmeta_swept_rows_total", {"outcome": "expired"}) == 1


@pytest.mark.parametrize(
    ("call", "request_", "field"),
    [
        ("RenewPins", ledger_pb2.RenewPinsRequest(engine=engine()), "worker_id"),
        ("RenewPins", ledger_pb2.RenewPinsRequest(worker_id="d1"), "engine.engine_id"),
        ("RenewPins", renew(pin(), pin("")), "pins[1].turn_id"),
        ("RenewPins", renew(pin("x" * 65)), "pins[0].turn_id"),
        ("RenewPins", renew(pin(remaining=-1)), "pins[0].engine_remaining"),
        ("RenewPins", renew(pin(extension=-1)), "pins[0].deadline_extension"),
        ("RenewPins", renew(*[pin()] * 10_001), "pins"),
        ("EvictHandles", ledger_pb2.EvictHandlesRequest(engine=engine()), "worker_id"),
        ("EvictHandles", ledger_pb2.EvictHandlesRequest(worker_id="d1"), "engine.engine_id"),
        ("EvictHandles", evict(), "turn_ids"),
        ("EvictHandles", evict(*"x" * 1001), "turn_ids"),
        ("EvictHandles", evict("a", "x" * 65), "turn_ids[1]"),
        ("ListPins", ledger_pb2.ListPinsRequest(page_size=1001), "page_size"),
        ("ListPins", ledger_pb2.ListPinsRequest(page_token="!"), "page_token"),
        ("ListPins", ledger_pb2.ListPinsRequest(worker_id="x" * 129), "worker_id"),
        ("ListPins", ledger_pb2.ListPinsRequest(tenant="x" * 129), "tenant"),
        ("ListPins", ledger_pb2.ListPinsRequest(model="x" * 257), "model"),
    ],
)
async def test_the_field_at_fault_is_named(served, call, request_, field) -> None:
    with pytest.raises(InvalidFieldError) as caught, typed_errors():
        await getattr(served.ledger, call)(request_)
    assert caught.value.field == field
