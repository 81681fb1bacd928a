"""The worker pool and what keeps it up to date."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import pytest
from structlog.testing import capture_logs

from kvloop.common.v1 import common_pb2
from kvloop.errors import (
    KvloopError,
    OutOfRangeError,
    UnavailableError,
)
from kvloop.kvmeta.v1 import registry_pb2
from services.common.backoff import Backoff
from services.router.policy import TurnFacts
from services.router.registry import RegistryFollower
from tests.flow.router.fakes import eventually, make_worker
from tests.flow.router.stack import DECODE, PREFILL
from tests.unit.router.pool_harness import Harness, harness

Change = registry_pb2.WatchWorkersResponse


async def test_one_channel_per_worker_closed_at_the_end() -> None:
    async with harness() as h:
        for _ in range(3):
            await h.pool.put(make_worker("a", PREFILL))
        assert len(h.open) == 1
    assert h.open == []


async def test_candidates_are_of_the_model_and_role() -> None:
    async with harness() as h:
        await h.pool.put(make_worker("a", PREFILL))
        await h.pool.put(make_worker("b", DECODE))
        await h.pool.put(make_worker("c", PREFILL, model="other"))
        assert h.prefill_ids() == ["a"]
        assert [m.name for m in h.pool.models()] == ["other", "tiny"]


async def test_turns_in_flight_are_counted() -> None:
    async with harness() as h:
        await h.pool.put(make_worker("a", PREFILL))
        with h.pool.use("a"), h.pool.use("a"):
            assert h.pool.candidates("tiny", PREFILL)[0].in_flight == 2
        assert h.pool.candidates("tiny", PREFILL)[0].in_flight == 0


async def test_using_a_worker_that_left_is_unavailable() -> None:
    async with harness() as h:
        with pytest.raises(UnavailableError) as caught, h.pool.use("gone"):
            pass
        assert caught.value.reason == "WORKER_UNREACHABLE"


async def test_channel_of_a_worker_that_left_closes_with_its_last_turn() -> None:
    async with harness() as h:
        await h.pool.put(make_worker("a", PREFILL))
        with h.pool.use("a"):
            h.pool.remove("a")
            assert h.prefill_ids() == []
            assert not h.clients[0].expects_more
            await asyncio.sleep(0)
            assert len(h.open) == 1
        await eventually(lambda: h.open == [])


@pytest.mark.parametrize("change", [{"address": "127.0.0.1:2"}, {"epoch": "2"}])
async def test_a_new_life_gets_a_new_channel(change) -> None:
    async with harness() as h:
        await h.pool.put(make_worker("a", PREFILL))
        h.fail("a")
        await h.pool.put(make_worker("a", PREFILL, **change))
        await eventually(lambda: len(h.open) == 1)
        found = h.pool.find("a")
        assert found is not None
        assert found.reachable
        with h.pool.use("a") as client:
            assert client is cast(object, h.clients[-1])
        assert [made.expects_more for made in h.clients] == [False, True]


async def test_a_new_state_keeps_the_channel() -> None:
    async with harness() as h:
        await h.pool.put(make_worker("a", PREFILL))
        changed = make_worker("a", PREFILL)
        changed.state = registry_pb2.Worker.STATE_DRAINING
        await h.pool.put(changed)
        found = h.pool.find("a")
        assert found is not None
        assert not found.takes_turns
        assert len(h.open) == 1
        assert h.pool.models()[0].prefill == []


async def test_legs_teach_what_the_worker_takes() -> None:
    async with harness() as h:
        await h.pool.put(make_worker("a", PREFILL))
        await h.pool.put(make_worker("b", PREFILL))
        for _ in range(3):
            facts = TurnFacts(prompt_tokens=1000)
            with h.pool.use("a", facts):
                h.now += 2
                report = common_pb2.PrefillReport(prompt_tokens=1000, recomputed_tokens=1000)
                h.pool.prefilled("a", facts, report)
        a, b = h.pool.candidates("tiny", PREFILL)
        assert a.load.speeds.prefill(500, 0) == pytest.approx(1.0)
        assert b.load.own is None
        assert b.load.speeds.prefill(500, 0) == pytest.approx(1.0)


async def test_a_leg_that_is_cut_off_leaves_the_queue() -> None:
    async with harness() as h:
        await h.pool.put(make_worker("a", PREFILL))
        load = h.pool.candidates("tiny", PREFILL)[0].load
        with h.pool.use("a", TurnFacts(prompt_tokens=1000)):
            assert load.wait(1, h.now) > 0
        assert load.wait(0, h.now) == 0


async def test_unconfirmed_workers_are_kept_for_the_grace_period() -> None:
    async with harness() as h:
        for worker_id in ("a", "b", "c"):
            await h.pool.put(make_worker(worker_id, PREFILL))
        h.pool.keep_only({"a"})
        h.now += 9
        h.pool.keep_only({"a"})  # a second outage does not prolong it
        await h.pool.put(make_worker("b", PREFILL))
        assert h.prefill_ids() == ["a", "b", "c"]
        h.now += 1
        assert h.prefill_ids() == ["a", "b"]
        await eventually(lambda: len(h.open) == 2)


ENDS = Change()
"""In a script: the watch has lasted long enough."""


class ScriptedRegistry:
    """Each watch plays one script, then fails; after the last it waits.

    A script that is an error fails at once with it.
    """

    def __init__(self, *scripts: list[registry_pb2.WatchWorkersResponse] | KvloopError) -> None:
        self.scripts = list(scripts)
        self.resumed_after: list[int] = []

    @property
    def watches(self) -> int:
        return len(self.resumed_after)

    async def watch(self, after_revision):
        self.resumed_after.append(after_revision)
        script = self.scripts.pop(0)
        if isinstance(script, KvloopError):
            raise script
        for change in script:
            if change is ENDS:
                return
            yield change
        if not self.scripts:
            await asyncio.Event().wait()
        raise UnavailableError("registry gone")


def added(worker_id: str, revision: int = 0) -> registry_pb2.WatchWorkersResponse:
    worker = make_worker(worker_id, PREFILL)
    return Change(type=Change.TYPE_ADDED, worker=worker, revision=revision)


def removed(worker_id: str, revision: int = 0) -> registry_pb2.WatchWorkersResponse:
    worker = make_worker(worker_id, PREFILL)
    return Change(type=Change.TYPE_REMOVED, worker=worker, revision=revision)


def synced(revision: int) -> registry_pb2.WatchWorkersResponse:
    return Change(type=Change.TYPE_SYNCED, revision=revision)


SYNCED = Change(type=Change.TYPE_SYNCED)


@asynccontextmanager
async def following(registry: ScriptedRegistry) -> AsyncIterator[tuple[Harness, RegistryFollower]]:
    async with harness() as h, asyncio.TaskGroup() as tasks:
        follower = RegistryFollower(registry, h.pool, backoff=Backoff(0.001, 0.002))
        task = tasks.create_task(follower.run())
        yield h, follower
        task.cancel()


async def test_pool_follows_the_registry() -> None:
    script = [added("a"), added("b"), SYNCED, added("c"), removed("a")]
    async with following(ScriptedRegistry(script)) as (h, follower):
        await eventually(lambda: h.prefill_ids() == ["b", "c"])
        assert follower.connected


async def test_pool_keeps_what_it_knows_through_outages() -> None:
    registry = ScriptedRegistry([added("a"), SYNCED], [], [], [SYNCED, added("b")])
    async with following(registry) as (h, follower):
        await eventually(lambda: h.prefill_ids() == ["a", "b"])
        assert registry.watches == 4
        assert follower.connected
        h.now += 10
        assert h.prefill_ids() == ["b"]


async def test_pool_goes_on_after_the_last_change_it_has_seen() -> None:
    registry = ScriptedRegistry(
        [added("a", 4), added("b", 6), synced(6), added("c", 8)],
        [removed("a", 9)],
        [synced(9)],
    )
    async with following(registry) as (h, follower):
        await eventually(lambda: follower.connected and registry.watches == 3)
        assert registry.resumed_after == [0, 8, 9]
        h.now += 10  # what was not sent again is not forgotten
        assert h.prefill_ids() == ["b", "c"]


async def test_a_watch_that_has_lasted_long_enough_is_no_outage() -> None:
    registry = ScriptedRegistry(
        [added("a", 4), synced(4), added("b", 6), ENDS],
        [synced(6), ENDS],
        [synced(6), added("c", 7)],
    )
    with capture_logs() as logs:
        async with following(registry) as (h, follower):
            await eventually(lambda: h.prefill_ids() == ["a", "b", "c"])
            assert follower.connected
    assert registry.resumed_after == [0, 6, 6]
    assert [log["event"] for log in logs if log["event"].startswith("registry")] == [
        "registry_synced"
    ]


async def test_half_of_the_first_state_is_no_place_to_resume_at() -> None:
    registry = ScriptedRegistry([added("a", 4)], [added("a", 4), added("b", 6), synced(6)])
    async with following(registry) as (h, _):
        await eventually(lambda: h.prefill_ids() == ["a", "b"])
        assert registry.resumed_after == [0, 0]


async def test_pool_starts_anew_where_the_registry_does_not_remember() -> None:
    registry = ScriptedRegistry(
        [added("a", 4), added("b", 5), synced(5)],
        OutOfRangeError("forgotten", reason="REVISION_FORGOTTEN"),
        [added("a", 40), synced(41)],
    )
    async with following(registry) as (h, follower):
        await eventually(lambda: follower.connected and registry.watches == 3)
        assert registry.resumed_after == [0, 5, 0]
        h.now += 10
        assert h.prefill_ids() == ["a"]


async def test_an_outage_is_logged_once() -> None:
    registry = ScriptedRegistry([added("a"), SYNCED], [], [], [], [SYNCED])
    with capture_logs() as logged:
        async with following(registry):
            await eventually(lambda: registry.watches == 5)
    events = [entry["event"] for entry in logged if entry["event"].startswith("registry_")]
    assert events == ["registry_synced", "registry_lost", "registry_synced"]
