"""The status page's feed and files, without a browser."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from kvloop.kvmeta.v1 import registry_pb2
from services.router.candidates import Candidate
from services.router.status import views
from services.router.status.feed import StatusFeed
from services.router.status.journal import TurnJournal
from tests.flow.status.scenes import (
    KEY,
    NOW,
    FakeFleet,
    Scene,
    conversation,
    scene,
    turn,
    worker,
)


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as opened:
        yield opened


async def _parts(
    session: aiohttp.ClientSession, page: Scene, key: str = "", until: str = "ledger"
) -> dict[str, Any]:
    """The first look of the feed, up to the part named."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    found: dict[str, Any] = {}
    async with session.get(page.url + "events", headers=headers) as reply:
        assert reply.status == 200
        while until not in found:
            event = (await reply.content.readuntil(b"\n\n")).decode()
            if event.startswith("event: "):
                name, data = event.strip().removeprefix("event: ").split("\ndata: ")
                found[name] = json.loads(data)
    return found


async def test_the_feed_shows_workers_conversations_and_turns(
    session: aiohttp.ClientSession,
) -> None:
    async with scene() as page:
        page.fleet.entries = [worker("prefill", 0), worker("decode", 1)]
        page.fleet.rows["default"] = [conversation(1)]
        page.journal.record(turn(5))

        parts = await _parts(session, page)

    assert [one["state"] for one in parts["workers"]] == ["active", "active"]
    assert parts["conversations"]["shown"][0]["tokens"] == 1037
    assert parts["turns"][0]["pulled"] == 20_000
    assert parts["figures"][-1]["hit_rate"] == 1.0
    assert parts["ledger"] == {"reachable": True, "reason": ""}
    assert "tenant" not in parts["turns"][0]


@pytest.mark.parametrize("registered", ["STATE_ACTIVE", "STATE_DRAINING"])
def test_a_worker_drains_once_the_registry_or_the_worker_itself_says_so(registered: str) -> None:
    entry = worker("decode", 1)
    entry.worker.state = registry_pb2.Worker.State.Value(registered)
    active = registry_pb2.Worker.STATE_ACTIVE
    refusing = Candidate(worker("decode", 1).worker)
    refusing.takes_turns = False
    taking = Candidate(worker("decode", 1).worker)

    def shown(candidate: Candidate) -> list[str]:
        return [one["state"] for one in views.workers([entry], {"decode-1": candidate})]

    assert shown(refusing) == ["draining"]
    assert shown(taking) == ["active" if entry.worker.state == active else "draining"]
    assert [one["state"] for one in views.seen_only({"decode-1": refusing})] == ["draining"]


async def test_a_key_shows_its_own_tenant_only(session: aiohttp.ClientSession) -> None:
    async with scene(keys={KEY: "acme", "other": "umbrella"}) as page:
        page.fleet.rows["acme"] = [conversation(1)]
        page.journal.record(turn(1, tenant="acme"))

        mine = await _parts(session, page, KEY)
        theirs = await _parts(session, page, "other")
        async with session.get(page.url + "events") as refused:
            status = refused.status

    assert len(mine["turns"]) == len(mine["conversations"]["shown"]) == 1
    assert theirs["turns"] == theirs["conversations"]["shown"] == []
    assert theirs["figures"][-1]["turns"] == 0
    assert status == 401


async def test_without_the_ledger_the_page_shows_what_the_router_knows(
    session: aiohttp.ClientSession,
) -> None:
    async with scene() as page:
        page.fleet.entries = [worker("decode", 1)]
        page.fleet.away = True

        parts = await _parts(session, page)

    assert parts["ledger"] == {"reachable": False, "reason": "LEDGER_UNAVAILABLE"}
    assert [one["worker_id"] for one in parts["workers"]] == ["decode-1"]
    assert parts["workers"][0]["retained_blocks"] is None


async def test_viewers_beyond_the_limit_are_asked_to_come_back(
    session: aiohttp.ClientSession,
) -> None:
    async with scene(max_viewers=1) as page:
        async with session.get(page.url + "events") as first:
            await first.content.readuntil(b"\n\n")
            async with session.get(page.url + "events") as second:
                assert (second.status, second.headers["retry-after"]) == (503, "10")


async def test_files_come_from_here_and_may_load_nothing_from_elsewhere(
    session: aiohttp.ClientSession,
) -> None:
    async with scene(keys={}) as page:
        for name in ("", "app.js", "charts.js", "style.css", "icon.svg"):
            async with session.get(page.url + name) as reply:
                assert reply.status == 200
                assert "default-src 'none'" in reply.headers["content-security-policy"]
                text = await reply.text()
            assert "://" not in text.replace("http://www.w3.org", "")
        async with session.get(page.url + "../ui/settings.py") as reply:
            assert reply.status == 404
        async with session.get(page.url.rstrip("/")) as reply:
            assert str(reply.url) == page.url


async def test_the_feed_ends_when_the_router_leaves_so_that_it_need_not_wait_for_viewers() -> None:
    looks = 0

    async def pause(seconds: float) -> None:
        nonlocal looks
        looks += 1

    feed = StatusFeed(
        FakeFleet(),
        TurnJournal(lambda: NOW),
        dict,
        interval_seconds=2,
        leaving=lambda: looks == 3,
        sleep=pause,
    )

    events = [event async for event in feed.events("default")]

    assert looks == 3
    assert events[-1] == b": nothing new\n\n"
