"""Every finished turn finds its leg, or its blocks are released."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from kvloop.errors import PreconditionError
from services.worker.event_hub import EventHub
from services.worker.event_messages import EngineRef
from services.worker.metrics import WorkerMetrics
from tests.unit.worker.fakes import ENGINE, PARAMS, FakeClock, FakeLink, finished, hello


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def metrics() -> WorkerMetrics:
    return WorkerMetrics()


@pytest.fixture
def link() -> FakeLink:
    return FakeLink()


@pytest.fixture
def hub(clock: FakeClock, metrics: WorkerMetrics, link: FakeLink) -> EventHub:
    hub = EventHub(clock, metrics)
    hub.connected(hello(), link)
    return hub


def _orphans(metrics: WorkerMetrics, cause: str) -> float | None:
    return metrics.registry.get_sample_value("kvloop_worker_orphan_turns_total", {"cause": cause})


async def test_a_watched_turn_gets_its_event(hub: EventHub, clock: FakeClock) -> None:
    with hub.watch("turn-1") as watch:
        waiting = asyncio.ensure_future(watch.finished())
        await asyncio.sleep(0)
        clock.now = 1234.0
        hub.finished(ENGINE, finished())
        turn = await waiting
        watch.claim()
    assert turn.params == PARAMS
    assert (turn.engine, turn.num_tokens, turn.received_at) == (ENGINE, 64, 1234.0)


async def test_an_event_that_came_first_is_there_at_once(hub: EventHub) -> None:
    with hub.watch("turn-1") as watch:
        hub.finished(ENGINE, finished())
        assert (await watch.finished()).retained
        watch.claim()


async def test_a_claimed_turn_is_not_released(hub: EventHub, link: FakeLink) -> None:
    with hub.watch("turn-1") as watch:
        hub.finished(ENGINE, finished())
        watch.claim()
    assert link.released == []


async def test_a_turn_whose_leg_ended_without_claiming_it_is_released(
    hub: EventHub, link: FakeLink, metrics: WorkerMetrics
) -> None:
    with hub.watch("turn-1"):
        hub.finished(ENGINE, finished())
    assert link.released == ["req-1"]
    assert _orphans(metrics, "abandoned") == 1


async def test_an_event_that_comes_after_its_leg_is_released(
    hub: EventHub, link: FakeLink, metrics: WorkerMetrics
) -> None:
    with hub.watch("turn-1"):
        pass
    hub.finished(ENGINE, finished())
    assert link.released == ["req-1"]
    assert _orphans(metrics, "unknown") == 1


async def test_a_second_event_for_a_turn_is_released(hub: EventHub, link: FakeLink) -> None:
    second = finished(params=msgspec.Raw(b'{"remote_request_id":"req-2"}'))
    with hub.watch("turn-1") as watch:
        hub.finished(ENGINE, finished())
        hub.finished(ENGINE, second)
        watch.claim()
    assert link.released == ["req-2"]


async def test_turns_that_retain_nothing_are_no_orphans(
    hub: EventHub, link: FakeLink, metrics: WorkerMetrics
) -> None:
    with hub.watch("turn-1"):
        hub.finished(ENGINE, finished(retained=False))
    hub.finished(ENGINE, finished("turn-2", retained=False))
    assert link.released == []
    assert _orphans(metrics, "abandoned") is None
    assert _orphans(metrics, "unknown") is None


async def test_one_turn_id_has_one_leg_at_a_time(hub: EventHub) -> None:
    with hub.watch("turn-1"), pytest.raises(PreconditionError) as caught, hub.watch("turn-1"):
        pass
    assert caught.value.reason == "TURN_RUNNING"
    with hub.watch("turn-1"):
        pass


async def test_releases_wait_for_a_connector_that_reconnects(hub: EventHub, link: FakeLink) -> None:
    hub.disconnected(ENGINE, link)
    hub.release(ENGINE, ["a", "b"])
    again = FakeLink()
    hub.connected(hello(), again)
    assert again.released == ["a", "b"]
    assert link.released == []


async def test_releases_for_an_earlier_life_of_the_engine_are_dropped(
    hub: EventHub, link: FakeLink
) -> None:
    hub.disconnected(ENGINE, link)
    hub.release(ENGINE, ["a"])
    again = FakeLink()
    hub.connected(hello(epoch="epoch-2"), again)
    hub.connected(hello(), FakeLink())
    assert again.released == []


async def test_a_stale_disconnect_does_not_cut_the_new_connection(
    hub: EventHub, link: FakeLink
) -> None:
    again = FakeLink()
    hub.connected(hello(), again)
    hub.disconnected(ENGINE, link)
    hub.release(ENGINE, ["a"])
    assert again.released == ["a"]


async def test_a_new_life_of_the_engine_wakes_those_who_wait_for_one(hub: EventHub) -> None:
    waiting = asyncio.ensure_future(hub.identity_after(ENGINE))
    await asyncio.sleep(0)
    hub.connected(hello(), FakeLink())  # the same life again
    await asyncio.sleep(0)
    assert not waiting.done()
    hub.connected(hello(epoch="epoch-2"), FakeLink())
    assert (await waiting).ref == EngineRef("engine-1", "epoch-2")
    assert hub.identity is not None
    assert hub.identity.epoch == "epoch-2"


async def test_a_handle_that_names_no_request_cannot_be_released(
    hub: EventHub, link: FakeLink
) -> None:
    hub.finished(ENGINE, finished(params=msgspec.Raw(b'{"a":1}')))
    assert link.released == []
