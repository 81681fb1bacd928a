"""A headless Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest


def chromium() -> str:
    """Where the browser is. Without one the test is skipped, or fails where it must not be."""
    found = shutil.which("chromium")
    if found is None:
        if os.environ.get("KVLOOP_REQUIRE_CHROMIUM"):
            pytest.fail("chromium is missing; it is the package chromium")
        pytest.skip("chromium is not installed; it is the package chromium")
    return found


class Page:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._next_id = 0
        self.complaints: list[str] = []
        """What the console reported as an error or a warning, and uncaught errors."""

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One DevTools command."""
        self._next_id += 1
        await self._socket.send_json({"id": self._next_id, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json()
            if message.get("id") == self._next_id:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    async def open(
        self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False
    ) -> None:
        """Load a page in a window of that size."""
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call("Page.navigate", url=url)
        await self.until(f"location.href === '{url}' && document.readyState === 'complete'")

    async def js(self, expression: str) -> Any:
        """The value of an expression."""
        result = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until an expression is true."""
        async with asyncio.timeout(20):
            while not await self.js(f"Boolean({expression})"):  # noqa: ASYNC110, it is elsewhere
                await asyncio.sleep(0.05)

    async def press(self, key: str, code: int) -> None:
        """Press and release a key."""
        named = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        text = {"text": "\r"} if key == "Enter" else {}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **named, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **named)

    async def screenshot(self) -> bytes:
        """The whole page as a PNG."""
        found = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(found["data"])

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.complaints.append(str(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.complaints.append(str(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url')}")


@asynccontextmanager
async def browser(profile: Path) -> AsyncIterator[Page]:
    """A tab of a browser of its own."""
    process = await asyncio.create_subprocess_exec(
        chromium(),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--remote-debugging-port=0",
        f"--user-data-dir={profile}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(30):
            while b"DevTools listening on" not in (line := await process.stderr.readline()):
                assert line, "the browser has ended"
        port = line.decode().split("://")[1].split("/")[0].rsplit(":", 1)[1]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as reply:
                targets = await reply.json()
            url = next(one["webSocketDebuggerUrl"] for one in targets if one["type"] == "page")
            async with session.ws_connect(url, max_msg_size=0) as socket:
                yield Page(socket)
    finally:
        if process.returncode is None:
            os.killpg(process.pid, 9)
        # What the dead wrote is read, so that the pipe is closed before the loop.
        await process.communicate()
        sys.stderr.flush()
