"""The status page in a real browser. Screenshots go to KVLOOP_SCREENSHOTS if it is set."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.flow.status.browser import Page, browser
from tests.flow.status.scenes import KEY, Scene, conversation, scene, turn, worker

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
async def page(tmp_path: Path) -> AsyncIterator[Page]:
    async with browser(tmp_path / "profile") as opened:
        yield opened
        assert opened.complaints == []


def _fill(shown: Scene, conversations: int) -> None:
    shown.fleet.entries = [worker("prefill", 0), worker("decode", 0), worker("decode", 1)]
    shown.fleet.rows["default"] = [conversation(number) for number in range(conversations)]
    for number in range(min(conversations, 100)):
        shown.journal.record(turn(number))


async def _keep(page: Page, name: str) -> None:
    if folder := os.environ.get("KVLOOP_SCREENSHOTS"):
        _write(Path(folder), name, await page.screenshot())


def _write(folder: Path, name: str, png: bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.png").write_bytes(png)


_ROWS = "document.querySelectorAll('#conversations tbody tr').length"
_OVERFLOW = "document.documentElement.scrollWidth > document.documentElement.clientWidth"


@pytest.mark.parametrize("conversations", [1, 20, 500])
@pytest.mark.parametrize(
    ("width", "dark"), [(1280, False), (390, True)], ids=["desktop", "phone-dark"]
)
async def test_shows_any_number_of_conversations(
    page: Page, conversations: int, width: int, dark: bool
) -> None:
    async with scene() as shown:
        _fill(shown, conversations)

        await page.open(shown.url, width=width, dark=dark)
        await page.until(f"{_ROWS} === {conversations}")

        assert await page.js("document.getElementById('link').dataset.state") == "live"
        assert await page.js("document.getElementById('tile-hits').textContent") == "100 %"
        assert not await page.js(_OVERFLOW)
        first = await page.js("document.querySelector('#conversations td').textContent")
        assert first == "agent-0000/<b>&\"'"
        await _keep(page, f"{conversations}-{'phone-dark' if dark else 'desktop'}")


async def test_says_what_to_do_while_there_is_nothing(page: Page) -> None:
    async with scene() as shown:
        await page.open(shown.url)
        await page.until("document.getElementById('link').dataset.state === 'live'")

        for table in ("turns", "workers", "conversations"):
            hint = f"document.getElementById('{table}').nextElementSibling"
            assert await page.js(f"{hint}.hidden") is False
        await _keep(page, "empty")


async def test_says_that_the_ledger_is_away_and_that_it_is_back(page: Page) -> None:
    async with scene() as shown:
        _fill(shown, 3)
        await page.open(shown.url)
        await page.until(f"{_ROWS} === 3")

        shown.fleet.away = True
        await page.until("!document.getElementById('ledger').hidden")
        assert await page.js(_ROWS) == 3
        retained = "document.getElementById('tile-retained').textContent"
        assert await page.js(retained) == "23 %"
        await _keep(page, "ledger-away")

        shown.fleet.away = False
        await page.until("document.getElementById('ledger').hidden")


async def test_says_that_the_router_is_away(page: Page) -> None:
    async with scene() as shown:
        _fill(shown, 1)
        await page.open(shown.url)
        await page.until(f"{_ROWS} === 1")

    await page.until("document.getElementById('link').dataset.state === 'lost'")
    await _keep(page, "router-away")
    page.complaints.clear()  # the browser reports the refused connection itself


async def test_asks_for_a_key_and_shows_that_tenant(page: Page) -> None:
    async with scene(keys={KEY: "acme"}) as shown:
        shown.fleet.rows["acme"] = [conversation(1)]
        await page.open(shown.url)
        await page.until("!document.getElementById('door').hidden")
        await _keep(page, "key")
        enter = (
            "document.getElementById('key').value = '{}';"
            "document.querySelector('#door button').click()"
        )
        await page.js(enter.format("wrong"))
        await page.until("document.getElementById('door-error').textContent")

        await page.js(enter.format(KEY))
        await page.until(f"{_ROWS} === 1")
        page.complaints[:] = [one for one in page.complaints if "401" not in one]


async def test_a_turn_opens_and_closes_by_keyboard(page: Page) -> None:
    async with scene() as shown:
        _fill(shown, 2)
        await page.open(shown.url)
        await page.until("document.querySelectorAll('#turns tbody tr').length === 2")
        for _ in range(20):
            await page.press("Tab", 9)
            if await page.js("document.activeElement.closest('#turns button') !== null"):
                break
        key = await page.js("document.activeElement.dataset.key")

        await page.press("Enter", 13)
        await page.until("document.getElementById('detail').open")
        assert key in await page.js("document.getElementById('receipt').textContent")
        lanes = "[...document.querySelectorAll('#timeline .track span')].map((s) => s.className)"
        assert await page.js(lanes) == ["prefill", "pull", "first", "answer"]
        await _keep(page, "turn")

        await page.press("Escape", 27)
        await page.until("!document.getElementById('detail').open")


async def test_finds_a_conversation_by_any_of_its_words(page: Page) -> None:
    async with scene() as shown:
        _fill(shown, 20)
        await page.open(shown.url)
        await page.until(f"{_ROWS} === 20")

        search = (
            "document.getElementById('filter').value = '{}';"
            "document.getElementById('filter').dispatchEvent(new Event('input'))"
        )
        await page.js(search.format("AGENT-0007"))
        assert await page.js(_ROWS) == 1
        await page.js(search.format("no such"))
        assert await page.js(_ROWS) == 0
        assert (
            await page.js("document.getElementById('conversations').nextElementSibling.hidden")
            is False
        )
