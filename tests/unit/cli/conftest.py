"""Services with scripted answers, reachable from synchronous tests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager

import pytest

from kvloop.cli import main
from tests.unit.cli.fake_kvmeta import FakeKvmeta, serve_kvmeta
from tests.unit.client.fake_router import FakeRouter, serve_router


@contextmanager
def _in_thread(serve: Callable[[], AbstractAsyncContextManager[str]]) -> Iterator[str]:
    """Run a server in a thread of its own, as the command's process is not its own."""
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    started: list[str] = []
    ready = threading.Event()

    async def run() -> None:
        async with serve() as address:
            started.append(address)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    try:
        assert ready.wait(10)
        yield started[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRouter]:
    """The router that commands talk to."""
    fake = FakeRouter()
    with _in_thread(lambda: serve_router(fake)) as address:
        monkeypatch.setenv("KVLOOP_ROUTER", address)
        yield fake


@pytest.fixture
def kvmeta(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKvmeta]:
    """The kvmeta that commands talk to."""
    fake = FakeKvmeta()  # type: ignore[abstract]
    with _in_thread(lambda: serve_kvmeta(fake)) as address:
        monkeypatch.setenv("KVLOOP_KVMETA", address)
        yield fake


@pytest.fixture
def kvloop() -> Callable[..., int]:
    """Runs the command; returns its exit status."""

    def run(*arguments: str) -> int:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        return int(caught.value.code or 0)

    return run
