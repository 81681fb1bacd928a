"""`kvloop top` against the router's own feed."""

from __future__ import annotations

import asyncio
import json
from itertools import islice

import pytest
from typer.testing import CliRunner

from kvloop.cli import app
from kvloop.errors import InvalidFieldError, UnauthenticatedError, UnavailableError
from kvloop.top.feed import looks, read_looks
from kvloop.top.screen import duration, sparkline
from tests.flow.status.scenes import KEY, Scene, conversation, scene, turn, worker


def _fill(shown: Scene) -> None:
    shown.fleet.entries = [worker("prefill", 0), worker("decode", 0)]
    shown.fleet.rows["default"] = [conversation(number) for number in range(30)]
    shown.journal.record(turn(3))
    shown.journal.record(turn(4, outcome="failed", error="ENGINE_FAILED", ttft=None))


async def _top(shown: Scene, *arguments: str) -> str:
    gateway = shown.url.removesuffix("/ui/")
    runner = CliRunner(env={"COLUMNS": "160"})
    done = await asyncio.to_thread(runner.invoke, app, ["top", "--gateway", gateway, *arguments])
    assert done.exit_code == 0, done.output
    return done.output


async def test_once_prints_turns_workers_and_conversations() -> None:
    async with scene() as shown:
        _fill(shown)

        text = await _top(shown, "--once")

    for word in ("decode-0", "agent-0003", "agent-0029", "engine failed", "24,000", "100%"):
        assert word in text


async def test_json_has_every_figure() -> None:
    async with scene() as shown:
        _fill(shown)

        look = json.loads(await _top(shown, "--once", "--json"))

    assert look["turns"][1]["pulled"] == 20_000
    assert len(look["conversations"]["shown"]) == 30


async def test_says_that_the_ledger_is_away() -> None:
    async with scene() as shown:
        _fill(shown)
        shown.fleet.away = True

        assert "kvmeta does not answer" in await _top(shown, "--once")


async def test_a_look_follows_every_change() -> None:
    async with scene() as shown:
        feed = looks(shown.url.removesuffix("/ui/"))
        first = await asyncio.to_thread(next, feed)
        shown.journal.record(turn(1))
        second = await asyncio.to_thread(next, feed)
        await asyncio.to_thread(feed.close)  # type: ignore[attr-defined]

    assert first["turns"] == []
    assert [one["conversation_id"] for one in second["turns"]] == ["agent-0001"]
    assert second["ledger"]["reachable"]


async def test_asks_for_the_key_and_takes_it() -> None:
    async with scene(keys={KEY: "acme"}) as shown:
        gateway = shown.url.removesuffix("/ui/")
        with pytest.raises(UnauthenticatedError, match="KVLOOP_API_KEY"):
            await asyncio.to_thread(next, looks(gateway))

        seen = await asyncio.to_thread(lambda: list(islice(looks(gateway, api_key=KEY), 1)))

    assert seen[0]["ledger"]["reachable"]


async def test_a_router_that_is_not_there_is_unavailable() -> None:
    async with scene() as shown:
        gateway = shown.url.removesuffix("/ui/")

    with pytest.raises(UnavailableError, match="does not answer"):
        await asyncio.to_thread(next, looks(gateway))


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://host:many", "http://"])
def test_an_address_that_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidFieldError):
        next(looks(url))


def test_a_look_ends_with_the_ledger_or_with_a_comment() -> None:
    lines = [
        b"event: turns\n",
        b"data: [1]\n",
        b"\n",
        b"event: ledger\n",
        b'data: {"reachable":true}\n',
        b"\n",
        b": nothing new\n",
        b"\n",
        b"event: turns\n",
        b"data: [2]\n",
        b"\n",
        b": nothing new\n",
    ]

    assert list(read_looks(lines)) == [
        {"turns": [1], "ledger": {"reachable": True}},
        {"turns": [2]},
    ]


def test_a_sparkline_has_gaps_and_a_top() -> None:
    assert sparkline([0.0, None, 0.5, 1.0], top=1.0) == "▁ ▅█"
    assert sparkline([]) == ""
    assert sparkline([None, 0.0]) == " ▁"
    assert [duration(value) for value in (None, 0.0123, 3.25, 600)] == [
        "-",
        "12 ms",
        "3.2 s",
        "10 min",
    ]
