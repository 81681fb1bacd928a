"""The ledger's RPCs answer as the proto says."""

from __future__ import annotations

import pytest

from kvloop.common.v1 import common_pb2
from kvloop.errors import (
    ConflictError,
    InvalidFieldError,
    LimitError,
    NotFoundError,
    OutOfRangeError,
    PreconditionError,
)
from kvloop.kvmeta.v1 import ledger_pb2
from kvloop.rpc import typed_errors
from tests.contract.kvmeta_stores import START_US
from tests.unit.kvmeta.messages import (
    PARAMS,
    commit,
    conversation,
    engine,
    register,
    seconds,
    take,
)

State = ledger_pb2.Conversation.State
Cause = ledger_pb2.WatchReleasesResponse.Cause


@pytest.fixture
async def ledger(served):
    """The ledger, with worker d1 registered."""
    await served.registry.RegisterWorker(register(ttl=300))
    return served.ledger


async def test_an_unknown_conversation_misses_as_a_first_turn(ledger) -> None:
    response = await ledger.TakeHandle(take())
    assert response.turn == 1
    assert response.WhichOneof("outcome") == "miss_reason"
    assert response.miss_reason == common_pb2.MISS_REASON_FIRST_TURN


async def test_a_committed_handle_is_taken_whole(ledger, clock) -> None:
    committed = await ledger.CommitTurn(commit(turn=1))
    assert committed.granted_ttl == seconds(475)
    assert committed.revision == START_US
    clock.advance(1)
    response = await ledger.TakeHandle(take())
    assert response.turn == 2
    assert response.handle == ledger_pb2.Handle(
        handle_id=committed.handle_id,
        worker_id="d1",
        engine=engine(),
        turn=1,
        transfer_params_json=PARAMS,
        num_tokens=64,
        num_blocks=2,
        deadline_extension=seconds(0),
    )
    assert response.remaining_ttl == seconds(474)
    assert response.last_worker_id == "d1"


async def test_a_miss_names_its_reason_and_the_last_worker(ledger) -> None:
    await ledger.CommitTurn(commit())
    await ledger.TakeHandle(take(request_id="r2"))
    response = await ledger.TakeHandle(take(request_id="r3"))
    assert response.miss_reason == common_pb2.MISS_REASON_TAKEN
    assert response.last_worker_id == "d1"
    assert not response.HasField("remaining_ttl")


async def test_a_repeated_commit_answers_with_what_is_left_of_its_ttl(ledger, clock) -> None:
    first = await ledger.CommitTurn(commit(turn=1))
    clock.advance(100)
    again = await ledger.CommitTurn(commit(turn=1))
    assert again.handle_id == first.handle_id
    assert again.revision == first.revision
    assert again.granted_ttl == seconds(375)


async def test_a_late_commit_of_an_older_turn_is_aborted(ledger) -> None:
    await ledger.CommitTurn(commit(turn=2, request_id="new"))
    with pytest.raises(ConflictError) as caught, typed_errors():
        await ledger.CommitTurn(commit(turn=1, request_id="late"))
    assert caught.value.reason == "TURN_SUPERSEDED"
    assert caught.value.metadata == {"newest_turn": "2"}


async def test_a_commit_after_the_end_is_aborted(ledger) -> None:
    turn = (await ledger.TakeHandle(take())).turn
    await ledger.ReleaseConversation(ledger_pb2.ReleaseConversationRequest(key=conversation()))
    with pytest.raises(ConflictError, match="ended") as caught, typed_errors():
        await ledger.CommitTurn(commit(turn=turn))
    assert caught.value.reason == "TURN_SUPERSEDED"


async def test_a_commit_of_an_engine_that_is_gone_is_refused(ledger) -> None:
    request = commit()
    request.engine.epoch = "epoch-0"
    with pytest.raises(PreconditionError) as caught, typed_errors():
        await ledger.CommitTurn(request)
    assert caught.value.reason == "ENGINE_GONE"


async def test_params_over_the_limit_are_refused(ledger) -> None:
    request = commit()
    request.transfer_params_json = b"x" * 1000
    await ledger.CommitTurn(request)
    request.transfer_params_json = b"x" * 1001
    with pytest.raises(LimitError) as caught, typed_errors():
        await ledger.CommitTurn(request)
    assert caught.value.reason == "PARAMS_TOO_LARGE"
    assert caught.value.metadata == {"limit": "1000"}


async def test_conversations_over_the_limit_are_refused(ledger) -> None:
    for number in range(3):
        await ledger.CommitTurn(commit(f"c-{number}"))
    with pytest.raises(LimitError) as caught, typed_errors():
        await ledger.CommitTurn(commit("c-3"))
    assert caught.value.reason == "TOO_MANY_CONVERSATIONS"
    await ledger.CommitTurn(commit("c-3", tenant="u"))


async def test_a_returned_handle_is_available_again(ledger) -> None:
    handle_id = (await ledger.CommitTurn(commit())).handle_id
    await ledger.TakeHandle(take(request_id="r2"))
    request = ledger_pb2.ReturnHandleRequest(
        key=conversation(), handle_id=handle_id, request_id="r2"
    )
    assert (await ledger.ReturnHandle(request)).revision > START_US
    assert (await ledger.TakeHandle(take(request_id="r3"))).handle.handle_id == handle_id
    with pytest.raises(ConflictError) as caught, typed_errors():
        await ledger.ReturnHandle(request)
    assert caught.value.reason == "HANDLE_NOT_HELD"


async def test_releasing_says_what_there_was(ledger) -> None:
    request = ledger_pb2.ReleaseConversationRequest(key=conversation())
    unknown = await ledger.ReleaseConversation(request)
    assert (unknown.found, unknown.released) == (False, False)
    await ledger.CommitTurn(commit(turn=2))
    first = await ledger.ReleaseConversation(request)
    assert (first.found, first.released) == (True, True)
    again = await ledger.ReleaseConversation(request)
    assert (again.found, again.released) == (True, False)


async def test_a_conversation_ttl_is_granted_from_now(ledger, clock) -> None:
    await ledger.CommitTurn(commit())
    clock.advance(10)
    request = ledger_pb2.ExtendConversationRequest(key=conversation(), ttl=seconds(60))
    assert (await ledger.ExtendConversation(request)).granted_ttl == seconds(50)
    await ledger.TakeHandle(take())
    assert (await ledger.ExtendConversation(request)).granted_ttl == seconds(0)


async def test_a_ttl_that_cannot_be_honoured_names_both_figures(ledger) -> None:
    await ledger.CommitTurn(commit())
    request = ledger_pb2.ExtendConversationRequest(key=conversation(), ttl=seconds(600))
    with pytest.raises(PreconditionError, match=r"600.*480") as caught, typed_errors():
        await ledger.ExtendConversation(request)
    assert caught.value.reason == "TTL_NOT_HONOURED"


@pytest.mark.parametrize("call", ["GetConversation", "ExtendConversation"])
async def test_an_unknown_conversation_is_not_found(ledger, call) -> None:
    request = {
        "GetConversation": ledger_pb2.GetConversationRequest(key=conversation()),
        "ExtendConversation": ledger_pb2.ExtendConversationRequest(
            key=conversation(), ttl=seconds(1)
        ),
    }[call]
    with pytest.raises(NotFoundError) as caught, typed_errors():
        await getattr(ledger, call)(request)
    assert caught.value.reason == "CONVERSATION_NOT_FOUND"


async def test_another_tenants_conversation_is_as_unknown_as_none(ledger) -> None:
    await ledger.CommitTurn(commit(tenant="t"))

    async def refused(call: str, request):
        with pytest.raises((NotFoundError, ConflictError)) as caught, typed_errors():
            await getattr(ledger, call)(request)
        error = caught.value
        return type(error), error.reason, error.message, error.metadata

    async def seen_by(name: str):
        key = conversation(name, tenant="u")
        get = ledger_pb2.GetConversationRequest(key=key)
        extend = ledger_pb2.ExtendConversationRequest(key=key, ttl=seconds(9999))
        give_back = ledger_pb2.ReturnHandleRequest(key=key, handle_id="h", request_id="r")
        return [
            await refused("GetConversation", get),
            await refused("ExtendConversation", extend),
            await refused("ReturnHandle", give_back),
            await ledger.TakeHandle(take(name, tenant="u")),
            await ledger.ReleaseConversation(ledger_pb2.ReleaseConversationRequest(key=key)),
        ]

    assert await seen_by("c") == await seen_by("does not exist")
    listed = await ledger.ListConversations(ledger_pb2.ListConversationsRequest(tenant="u"))
    assert list(listed.conversations) == []
    assert (await ledger.TakeHandle(take())).HasField("handle")


async def test_a_conversation_is_read_as_it_is_now(ledger, clock) -> None:
    committed = await ledger.CommitTurn(commit(turn=1))
    request = ledger_pb2.GetConversationRequest(key=conversation())
    clock.advance(75)
    found = (await ledger.GetConversation(request)).conversation
    assert found.key == conversation()
    assert (found.state, found.turn) == (State.STATE_AVAILABLE, 1)
    assert (found.worker_id, found.num_tokens, found.num_blocks) == ("d1", 64, 2)
    assert found.commit_time.ToMicroseconds() == START_US
    assert found.expire_time.ToMicroseconds() == START_US + 475_000_000
    assert found.remaining_ttl == seconds(400)
    assert not found.HasField("conversation_ttl")
    assert found.revision == committed.revision
    await ledger.ExtendConversation(
        ledger_pb2.ExtendConversationRequest(key=conversation(), ttl=seconds(60))
    )
    found = (await ledger.GetConversation(request)).conversation
    assert found.conversation_ttl == seconds(60)
    assert found.remaining_ttl == seconds(0)


async def test_conversations_are_paged(ledger, clock) -> None:
    for number in range(3):
        clock.advance(1)
        await ledger.CommitTurn(commit(f"c-{number}"))
    names, token = [], ""
    for _ in range(2):
        page = await ledger.ListConversations(
            ledger_pb2.ListConversationsRequest(tenant="t", page_size=2, page_token=token)
        )
        names += [found.key.conversation_id for found in page.conversations]
        token = page.next_page_token
    assert names == ["c-2", "c-1", "c-0"]
    assert token == ""


async def test_a_page_token_serves_its_own_query_only(ledger) -> None:
    for number in range(2):
        await ledger.CommitTurn(commit(f"c-{number}"))
    page = await ledger.ListConversations(
        ledger_pb2.ListConversationsRequest(tenant="t", page_size=1)
    )
    for tenant, model in (("u", ""), ("t", "m")):
        with pytest.raises(InvalidFieldError) as caught, typed_errors():
            await ledger.ListConversations(
                ledger_pb2.ListConversationsRequest(
                    tenant=tenant, model=model, page_token=page.next_page_token
                )
            )
        assert caught.value.field == "page_token"


async def test_releases_are_streamed_as_they_come_and_resumed(ledger) -> None:
    for turn in (1, 2):
        await ledger.CommitTurn(commit(turn=turn, request_id=f"r{turn}"))
    watch = ledger.WatchReleases(ledger_pb2.WatchReleasesRequest(worker_id="d1"))
    first = await anext(aiter(watch))
    assert first.cause == Cause.CAUSE_SUPERSEDED
    assert first.engine == engine()
    assert first.handle.turn == 1
    assert first.handle.transfer_params_json == PARAMS
    await ledger.ReleaseConversation(ledger_pb2.ReleaseConversationRequest(key=conversation()))
    second = await anext(aiter(watch))  # rung, not polled
    assert (second.cause, second.handle.turn) == (Cause.CAUSE_ENDED, 2)
    assert second.revision > first.revision
    watch.cancel()
    resumed = ledger.WatchReleases(
        ledger_pb2.WatchReleasesRequest(worker_id="d1", after_revision=first.revision)
    )
    assert await anext(aiter(resumed)) == second
    resumed.cancel()


async def test_a_sweep_wakes_the_watchers_of_releases(ledger, served, clock) -> None:
    await ledger.CommitTurn(commit())
    watch = ledger.WatchReleases(ledger_pb2.WatchReleasesRequest(worker_id="d1"))
    for request_id in ("a", "b"):  # its first message shows that it is watching
        await ledger.CommitTurn(commit("other", request_id=request_id))
    await anext(aiter(watch))
    await served.registry.RegisterWorker(register(ttl=300))
    clock.advance(299)
    await served.registry.RegisterWorker(register(ttl=300))
    clock.advance(176)
    await served.kvmeta.sweeper.sweep()
    assert (await anext(aiter(watch))).cause == Cause.CAUSE_EXPIRED
    watch.cancel()


async def test_a_watch_from_a_revision_that_was_never_given_out_is_out_of_range(ledger) -> None:
    watch = ledger.WatchReleases(
        ledger_pb2.WatchReleasesRequest(worker_id="d1", after_revision=2**64 - 1)
    )
    with pytest.raises(OutOfRangeError) as caught, typed_errors():
        await anext(aiter(watch))
    assert caught.value.reason == "RELEASES_FORGOTTEN"


async def test_outcomes_are_counted_by_name(ledger, served) -> None:
    await ledger.TakeHandle(take())
    await ledger.CommitTurn(commit())
    await ledger.CommitTurn(commit())
    await ledger.TakeHandle(take())
    count = served.kvmeta.metrics.registry.get_sample_value
    assert count("kvloop_kvmeta_takes_total", {"outcome": "first_turn"}) == 1
    assert count("kvloop_kvmeta_takes_total", {"outcome": "hit"}) == 1
    assert count("kvloop_kvmeta_commits_total", {"outcome": "stored"}) == 1
    assert count("kvloop_kvmeta_commits_total", {"outcome": "repeated"}) == 1
