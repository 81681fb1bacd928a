"""What the ledger gives up is freed in the engine, once, whatever happens between."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from kvloop.errors import OutOfRangeError, UnavailableError
from kvloop.kvmeta.v1 import ledger_pb2
from services.worker.event_hub import EventHub
from services.worker.event_messages import EngineRef, Pins, RetainedPin
from services.worker.metrics import WorkerMetrics
from services.worker.pins import ReleaseCause
from services.worker.releases import Release, ReleaseFollower
from tests.unit.worker.fakes import FakeClock, FakeLink, hello, until


class FakeFeed:
    """Plays one script per call: releases, then an error or silence."""

    def __init__(self, *scripts: list[Release | Exception]) -> None:
        self._scripts = list(scripts)
        self.asked_after: list[int] = []

    async def releases(self, worker_id: str, after_revision: int) -> AsyncIterator[Release]:
        assert worker_id == "decode-0"
        self.asked_after.append(after_revision)
        for step in self._scripts.pop(0) if self._scripts else []:
            if isinstance(step, Exception):
                raise step
            yield step
        await asyncio.Event().wait()


def release(revision: int, request_id: str, engine: EngineRef | None = None) -> Release:
    params = json.dumps({"remote_request_id": request_id}).encode()
    return Release(revision, engine or hello().ref, params, "ENDED")


async def follow(feed: FakeFeed, calls: int, released: int) -> list[str]:
    """Run a follower until it has asked and released so often; what it released."""
    clock, link = FakeClock(), FakeLink()
    hub = EventHub(clock, WorkerMetrics())
    hub.connected(hello(), link)
    follower = ReleaseFollower(feed, hub, clock, "decode-0")
    task = asyncio.create_task(follower.run())
    try:
        await until(lambda: len(feed.asked_after) >= calls and len(link.released) >= released)
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    return link.released


async def test_releases_reach_the_engine_in_order() -> None:
    feed = FakeFeed([release(1, "a"), release(2, "b")])
    assert await follow(feed, 1, 2) == ["a", "b"]


async def test_each_cause_of_the_ledger_is_counted_under_its_name() -> None:
    for name, value in ledger_pb2.WatchReleasesResponse.Cause.items():
        if value:
            assert ReleaseCause(name.removeprefix("CAUSE_").lower()) is not ReleaseCause.OTHER


async def test_a_cause_that_is_not_known_is_counted_as_other() -> None:
    metrics, link = WorkerMetrics(), FakeLink()
    hub = EventHub(FakeClock(), metrics)
    hub.connected(hello(), link)
    hub.reported(hello().ref, Pins([RetainedPin("a", "turn-1", 64, 2, 40.0, 0.0, 20.0)]))
    newer = replace(release(1, "a"), cause="99")
    follower = ReleaseFollower(FakeFeed([newer]), hub, FakeClock(), "decode-0")
    task = asyncio.create_task(follower.run())
    await until(lambda: link.released)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    value = metrics.registry.get_sample_value("kvloop_worker_releases_total", {"cause": "other"})
    assert value == 1


async def test_blocks_of_another_life_are_not_touched() -> None:
    other = EngineRef(hello().engine_id, "another epoch")
    feed = FakeFeed([release(1, "a", other), release(2, "b")])
    assert await follow(feed, 1, 1) == ["b"]


async def test_params_that_name_no_request_are_passed_over() -> None:
    feed = FakeFeed([Release(1, hello().ref, b"{}", "ENDED"), release(2, "b")])
    assert await follow(feed, 1, 1) == ["b"]


async def test_outage_resumes_after_the_last_release() -> None:
    feed = FakeFeed([release(7, "a"), UnavailableError("gone")], [release(8, "b")])
    assert await follow(feed, 2, 2) == ["a", "b"]
    assert feed.asked_after == [0, 7]


async def test_forgotten_revision_starts_over() -> None:
    feed = FakeFeed([release(7, "a"), OutOfRangeError("too old")], [release(90, "b")])
    assert await follow(feed, 2, 2) == ["a", "b"]
    assert feed.asked_after == [0, 0]
