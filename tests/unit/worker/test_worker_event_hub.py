"""Every finished turn finds its leg, or its blocks are released."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from kvloop.errors import PreconditionError
from services.worker.event_hub import EventHub
from services.worker.event_messages import (
    EngineRef,
    Freed,
    Pins,
    Renewed,
    RenewedPin,
    RetainedPin,
)
from services.worker.metrics import WorkerMetrics
from services.worker.pins import ReleaseCause
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
    hub.release(ENGINE, ["a", "b"], ReleaseCause.ENDED)
    again = FakeLink()
    hub.connected(hello(), again)
    assert again.released == ["a", "b"]
    assert link.released == []


async def test_releases_for_an_earlier_life_of_the_engine_are_dropped(
    hub: EventHub, link: FakeLink
) -> None:
    hub.disconnected(ENGINE, link)
    hub.release(ENGINE, ["a"], ReleaseCause.ENDED)
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
    hub.release(ENGINE, ["a"], ReleaseCause.ENDED)
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


async def test_a_retained_turn_is_in_hand_until_its_commit_is_settled(hub: EventHub) -> None:
    with hub.watch("turn-1") as watch:
        hub.reported(ENGINE, finished(ttl_seconds=60.0))
        watch.claim()
    (pin,) = hub.pins
    assert (pin.request_id, pin.num_tokens, pin.num_blocks) == ("req-1", 64, 2)
    assert (pin.deadline - pin.ended_at, pin.in_hand) == (60.0, True)
    hub.pins.settle("turn-1", "acme")
    assert (pin.tenant, pin.in_hand) == ("acme", False)


@pytest.mark.parametrize(
    ("lease_renewal", "renewable"), [(True, 480.0), (False, 0.0)], ids=["lease", "fixed"]
)
async def test_a_turn_knows_how_long_renewals_can_keep_it(
    clock: FakeClock, metrics: WorkerMetrics, lease_renewal: bool, renewable: float
) -> None:
    hub = EventHub(clock, metrics)
    hub.connected(hello(lease_renewal=lease_renewal), FakeLink())
    with hub.watch("turn-1") as watch:
        hub.reported(ENGINE, finished(ttl_seconds=60.0))
        assert (await watch.finished()).renewable_seconds == renewable
        watch.claim()


async def test_a_release_that_got_lost_is_sent_again(hub: EventHub, link: FakeLink) -> None:
    held = RetainedPin("req-1", "turn-1", 64, 2, 40.0, 0.0, 20.0)
    hub.reported(ENGINE, Pins([held]))
    hub.release(ENGINE, ["req-1"], ReleaseCause.ENDED)
    assert link.released == ["req-1"]  # into a connection that breaks
    hub.disconnected(ENGINE, link)
    again = FakeLink()
    hub.connected(hello(), again)
    hub.reported(ENGINE, Pins([held]))
    assert again.released == ["req-1"]


async def test_pins_of_an_earlier_life_are_not_mistaken_for_this_ones(hub: EventHub) -> None:
    hub.connected(hello(epoch="epoch-2"), FakeLink())
    hub.reported(ENGINE, Pins([RetainedPin("req-1", "turn-1", 64, 2, 40.0, 0.0, 20.0)]))
    assert len(hub.pins) == 0


async def test_listeners_hear_what_has_been_dealt_with(hub: EventHub) -> None:
    heard: list[tuple[object, int]] = []
    hub.listen(lambda message: heard.append((message, len(hub.pins))))
    pins = Pins([RetainedPin("req-1", "turn-1", 64, 2, 40.0, 0.0, 20.0)])
    for message in (pins, Renewed([RenewedPin("req-1", 60.0, 20.0)]), Freed(["req-1"])):
        hub.reported(ENGINE, message)
    assert [count for _, count in heard] == [1, 1, 0]
    assert heard[0][0] == pins


async def test_renewals_go_to_the_engine_that_is_connected_or_nowhere(
    hub: EventHub, link: FakeLink
) -> None:
    assert hub.renew(ENGINE, [("req-1", 60.0)])
    assert link.renewed == [("req-1", 60.0)]
    hub.disconnected(ENGINE, link)
    assert not hub.renew(ENGINE, [("req-1", 60.0)])
    again = FakeLink()
    hub.connected(hello(), again)
    assert again.renewed == []
