"""The registry's RPCs answer as the proto says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvloop.common.v1 import common_pb2
from kvloop.errors import OutOfRangeError, PreconditionError
from kvloop.kvmeta.v1 import ledger_pb2, registry_pb2
from kvloop.rpc import typed_errors
from services.kvmeta.model import WorkerRole
from services.kvmeta.registry import check_admission
from tests.contract import kvmeta_stores
from tests.contract.kvmeta_stores import POLICY, SECOND, START_US
from tests.unit.kvmeta.messages import commit, register, seconds, take, worker

Type = registry_pb2.WatchWorkersResponse.Type
State = registry_pb2.Worker.State


async def keep_alive(registry, *requests: registry_pb2.KeepAliveRequest):
    async def send():
        for request in requests:
            yield request

    return [response async for response in registry.KeepAlive(send())]


def renewal(lease_id: str, state=State.STATE_UNSPECIFIED):
    return registry_pb2.KeepAliveRequest(lease_id=lease_id, state=state)


async def test_a_registered_worker_gets_a_lease_and_its_handles_ttl(served) -> None:
    response = await served.registry.RegisterWorker(register())
    assert response.lease_id
    assert response.granted_ttl == seconds(15)
    assert response.handle_ttl == seconds(475)
    assert response.voided_handles == 0


@pytest.mark.parametrize(("wanted", "granted"), [(0, 15), (0.5, 1), (2.5, 2.5), (1000, 300)])
async def test_leases_are_kept_within_bounds(served, wanted, granted) -> None:
    response = await served.registry.RegisterWorker(register(ttl=wanted))
    assert response.granted_ttl == seconds(granted)


async def test_prefill_workers_leave_no_handles(served) -> None:
    request = register()
    request.worker.role = common_pb2.WORKER_ROLE_PREFILL
    assert (await served.registry.RegisterWorker(request)).handle_ttl == seconds(0)


async def test_a_new_engine_life_voids_handles_and_says_how_many(served) -> None:
    await served.registry.RegisterWorker(register())
    await served.ledger.CommitTurn(commit("a"))
    await served.ledger.CommitTurn(commit("b"))
    response = await served.registry.RegisterWorker(register(epoch="epoch-2"))
    assert response.voided_handles == 2
    missed = await served.ledger.TakeHandle(take("a"))
    assert missed.miss_reason == common_pb2.MISS_REASON_VOID


async def test_each_renewal_is_answered_and_a_lost_lease_is_no_error(served, clock) -> None:
    lease_id = (await served.registry.RegisterWorker(register())).lease_id
    clock.advance(14)
    answers = await keep_alive(
        served.registry, renewal(lease_id), renewal("unknown"), renewal(lease_id)
    )
    assert [answer.granted_ttl for answer in answers] == [seconds(15), seconds(0), seconds(15)]
    assert [answer.lease_id for answer in answers] == [lease_id, "unknown", lease_id]
    clock.advance(15)
    [answer] = await keep_alive(served.registry, renewal(lease_id))
    assert answer.granted_ttl == seconds(0)


async def test_a_deregistered_worker_is_gone_and_repeating_it_succeeds(served) -> None:
    lease_id = (await served.registry.RegisterWorker(register())).lease_id
    for _ in range(2):
        await served.registry.DeregisterWorker(
            registry_pb2.DeregisterWorkerRequest(lease_id=lease_id)
        )
    listed = await served.registry.ListWorkers(registry_pb2.ListWorkersRequest())
    assert list(listed.workers) == []


async def test_workers_are_listed_with_lease_and_retained_blocks(served) -> None:
    await served.registry.RegisterWorker(register())
    await served.ledger.CommitTurn(commit())
    listed = await served.registry.ListWorkers(registry_pb2.ListWorkersRequest())
    [entry] = listed.workers
    expected = worker()
    expected.state = State.STATE_ACTIVE
    assert entry.worker == expected
    assert entry.expire_time.ToMicroseconds() == START_US + 15 * SECOND
    assert (entry.retained_conversations, entry.retained_blocks) == (1, 2)


async def test_workers_are_paged_and_filtered(served) -> None:
    for number in range(3):
        await served.registry.RegisterWorker(register(f"d{number}"))
    names, token = [], ""
    for _ in range(2):
        page = await served.registry.ListWorkers(
            registry_pb2.ListWorkersRequest(
                model="m", role=common_pb2.WORKER_ROLE_DECODE, page_size=2, page_token=token
            )
        )
        names += [entry.worker.worker_id for entry in page.workers]
        token = page.next_page_token
    assert (names, token) == (["d0", "d1", "d2"], "")
    none = registry_pb2.ListWorkersRequest(role=common_pb2.WORKER_ROLE_PREFILL)
    assert list((await served.registry.ListWorkers(none)).workers) == []


async def test_a_watcher_gets_the_state_then_synced_then_every_change(served, clock) -> None:
    lease_id = (await served.registry.RegisterWorker(register("d1"))).lease_id
    watch = served.registry.WatchWorkers(registry_pb2.WatchWorkersRequest())
    changes = aiter(watch)
    seen = [await anext(changes), await anext(changes)]
    await served.registry.RegisterWorker(register("d2"))
    seen.append(await anext(changes))
    await keep_alive(served.registry, renewal(lease_id, State.STATE_DRAINING))
    seen.append(await anext(changes))
    await served.registry.RegisterWorker(register("d2", epoch="epoch-2"))
    seen.append(await anext(changes))
    await served.registry.DeregisterWorker(registry_pb2.DeregisterWorkerRequest(lease_id=lease_id))
    seen.append(await anext(changes))
    clock.advance(15)
    await served.kvmeta.sweeper.sweep()
    seen.append(await anext(changes))
    watch.cancel()
    assert [(change.type, change.worker.worker_id) for change in seen] == [
        (Type.TYPE_ADDED, "d1"),
        (Type.TYPE_SYNCED, ""),
        (Type.TYPE_ADDED, "d2"),
        (Type.TYPE_CHANGED, "d1"),
        (Type.TYPE_CHANGED, "d2"),
        (Type.TYPE_REMOVED, "d1"),
        (Type.TYPE_REMOVED, "d2"),
    ]
    assert not seen[1].HasField("worker")
    assert seen[3].worker.state == State.STATE_DRAINING
    assert seen[4].worker.engine.epoch == "epoch-2"
    assert seen[5].worker.address == "127.0.0.1:7400"
    revisions = [change.revision for change in seen[2:]]
    assert revisions == sorted(set(revisions))


async def watched(served, after_revision: int, until: int):
    """What a watcher gets after a revision, up to a number of messages."""
    watch = served.registry.WatchWorkers(
        registry_pb2.WatchWorkersRequest(after_revision=after_revision)
    )
    changes = aiter(watch)
    seen = [await anext(changes) for _ in range(until)]
    watch.cancel()
    return seen


def short(changes) -> list[tuple[int, str]]:
    return [(change.type, change.worker.worker_id) for change in changes]


async def test_a_watcher_resumes_after_what_it_has_handled(served) -> None:
    d1 = (await served.registry.RegisterWorker(register("d1"))).lease_id
    await served.registry.RegisterWorker(register("d2"))
    known = await watched(served, 0, 3)
    assert short(known) == [
        (Type.TYPE_ADDED, "d1"),
        (Type.TYPE_ADDED, "d2"),
        (Type.TYPE_SYNCED, ""),
    ]
    position = known[-1].revision
    assert short(await watched(served, position, 1)) == [(Type.TYPE_SYNCED, "")]

    d3 = (await served.registry.RegisterWorker(register("d3"))).lease_id
    await keep_alive(served.registry, renewal(d1, State.STATE_DRAINING))
    d4 = (await served.registry.RegisterWorker(register("d4"))).lease_id
    for lease_id in (d1, d3):
        await served.registry.DeregisterWorker(
            registry_pb2.DeregisterWorkerRequest(lease_id=lease_id)
        )
    missed = await watched(served, position, 3)
    # d3 came and went unseen.
    assert short(missed) == [
        (Type.TYPE_ADDED, "d4"),
        (Type.TYPE_REMOVED, "d1"),
        (Type.TYPE_SYNCED, ""),
    ]

    watch = served.registry.WatchWorkers(
        registry_pb2.WatchWorkersRequest(after_revision=missed[-1].revision)
    )
    changes = aiter(watch)
    assert (await anext(changes)).type == Type.TYPE_SYNCED
    assert missed[-1].revision > missed[-2].revision  # d3's end is not looked at again
    await keep_alive(served.registry, renewal(d4, State.STATE_DRAINING))
    live = await anext(changes)  # rung, not polled
    assert (live.type, live.worker.worker_id) == (Type.TYPE_CHANGED, "d4")
    watch.cancel()


async def test_the_first_state_can_be_resumed_in_its_middle(served) -> None:
    for name in ("d3", "d1", "d2"):
        await served.registry.RegisterWorker(register(name))
    everything = await watched(served, 0, 4)
    revisions = [change.revision for change in everything[:3]]
    assert revisions == sorted(revisions)
    rest = await watched(served, revisions[0], 3)
    assert [change.worker for change in rest] == [change.worker for change in everything[1:]]


@pytest.mark.parametrize("position", ["before the first", "never given out"])
async def test_a_watcher_from_an_unknown_revision_is_out_of_range(served, position) -> None:
    await served.registry.RegisterWorker(register())
    after = 1 if position == "before the first" else 2**64 - 1
    watch = served.registry.WatchWorkers(registry_pb2.WatchWorkersRequest(after_revision=after))
    with pytest.raises(OutOfRangeError) as caught, typed_errors():
        await anext(aiter(watch))
    assert caught.value.reason == "REVISION_FORGOTTEN"


async def test_renewable_workers_handles_are_given_out_for_their_whole_ttl(served) -> None:
    request = register()
    request.worker.traits.pin_lease.CopyFrom(seconds(60))
    assert (await served.registry.RegisterWorker(request)).handle_ttl == seconds(480)


async def test_a_watcher_of_an_empty_registry_is_synced_at_once(served) -> None:
    watch = served.registry.WatchWorkers(registry_pb2.WatchWorkersRequest())
    assert (await anext(aiter(watch))).type == Type.TYPE_SYNCED
    watch.cancel()


async def test_a_lease_that_ran_out_releases_what_its_engine_may_still_hold(served, clock) -> None:
    await served.registry.RegisterWorker(register())
    await served.ledger.CommitTurn(commit())
    clock.advance(15)
    await served.kvmeta.sweeper.sweep()
    watch = served.ledger.WatchReleases(ledger_pb2.WatchReleasesRequest(worker_id="d1"))
    release = await anext(aiter(watch))
    assert release.cause == ledger_pb2.WatchReleasesResponse.CAUSE_LEASE_ENDED
    watch.cancel()
    count = served.kvmeta.metrics.registry.get_sample_value
    assert count("kvloop_kvmeta_leases_ended_total") == 1


async def test_a_worker_of_another_contract_version_is_refused(served) -> None:
    request = register()
    request.worker.traits.contract_version = 3
    with pytest.raises(PreconditionError) as caught, typed_errors():
        await served.registry.RegisterWorker(request)
    assert caught.value.reason == "CONTRACT_VERSION"
    assert caught.value.metadata == {"contract_version": "3", "accepted": "1, 2"}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
async def test_a_side_channel_that_no_other_host_reaches_is_refused(served, host) -> None:
    request = register()
    request.worker.traits.side_channel_host = host
    await served.registry.RegisterWorker(request)  # all of it on this host
    request.worker.address = "10.0.0.7:7400"
    with pytest.raises(PreconditionError) as caught, typed_errors():
        await served.registry.RegisterWorker(request)
    assert caught.value.reason == "LOOPBACK_SIDE_CHANNEL"
    request.worker.traits.side_channel_host = "10.0.0.7"
    await served.registry.RegisterWorker(request)


@pytest.mark.parametrize(
    ("ledger_seconds", "engine_seconds", "refused"),
    [(480, 480, True), (476, 480, True), (475, 480, False), (600, 480, True), (4, 5, False)],
)
def test_a_ledger_ttl_not_shorter_than_the_engines_is_refused_with_both_figures(
    ledger_seconds, engine_seconds, refused
) -> None:
    policy = replace(POLICY, handle_ttl_us=ledger_seconds * SECOND)
    made = kvmeta_stores.worker(decoder_kv_blocks_ttl_us=engine_seconds * SECOND)
    if not refused:
        check_admission(made, policy)
        return
    figures = f"{ledger_seconds} s.*{engine_seconds} s"
    with pytest.raises(PreconditionError, match=figures) as caught:
        check_admission(made, policy)
    assert caught.value.reason == "LEDGER_TTL_TOO_LONG"


@pytest.mark.parametrize("why", ["prefill", "no bidirectional transfer"])
def test_a_worker_that_leaves_no_handles_may_have_any_ttl(why) -> None:
    policy = replace(POLICY, handle_ttl_us=600 * SECOND)
    if why == "prefill":
        made = kvmeta_stores.worker(role=WorkerRole.PREFILL)
    else:
        made = kvmeta_stores.worker(bidirectional_kv_xfer=False)
    check_admission(made, policy)
