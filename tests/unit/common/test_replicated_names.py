"""A channel to a name follows the replicas behind it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any

import grpc
import pytest

from kvloop.errors import InvalidFieldError
from services.common.replicated_channel import has_proxy, open_replicated_channel
from services.common.rpc_server import Drain
from tests.flow.sim.engines import poll
from tests.free_ports import held_port
from tests.unit.common.numbered_ledgers import ask, serving

pytestmark = pytest.mark.timeout(90)

_SHORT_WHILE = 0.01


class _Replicas:
    """Replicas, number n at 127.0.0.n, all on one port, and the name for them."""

    def __init__(self) -> None:
        self.found: set[int] = set()
        self.answered: list[int] = []
        self.asking = False
        self.looks = 0
        self.error: Exception | None = None
        self._running: dict[int, AsyncExitStack] = {}
        self.port = held_port()

    async def look_up(self, host: str) -> Collection[str]:
        assert host == "kvmeta"
        self.looks += 1
        if self.error is not None:
            raise self.error
        return {f"127.0.0.{number}" for number in self.found}

    async def start(self, number: int) -> None:
        stack = AsyncExitStack()
        drain = Drain(1, sleep=lambda _: self._turned_away_from(number))
        address = f"127.0.0.{number}:{self.port}"
        await stack.enter_async_context(serving(number, address, drain, self.answered))
        self._running[number] = stack
        self.found.add(number)

    async def stop(self, number: int) -> None:
        """Drain, and stop; the name has forgotten it when this returns."""
        await self._running.pop(number).aclose()
        self.found.discard(number)

    async def _turned_away_from(self, number: int) -> None:
        """As long as calls are made, until they go elsewhere."""
        await poll(lambda: not (self.asking and number in self.answered[-4:]))

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[grpc.aio.Channel]:
        """A channel to the name; for it, time passes a hundred times as fast."""
        async with open_replicated_channel(
            f"kvmeta:{self.port}",
            look_up=self.look_up,
            sleep=lambda seconds: asyncio.sleep(seconds * _SHORT_WHILE),
        ) as channel:
            yield channel

    async def have_looked(self, times: int) -> None:
        """Wait for some look-ups that begin from now on."""
        until = self.looks + times
        await poll(lambda: self.looks >= until)

    async def aclose(self) -> None:
        for number in [*self._running]:
            await self.stop(number)


@pytest.fixture
async def replicas() -> AsyncIterator[_Replicas]:
    replicas = _Replicas()
    yield replicas
    await replicas.aclose()


async def _until_answered_by(channel: grpc.aio.Channel, *numbers: int) -> None:
    """Make calls until these replicas answer, and no others; none may fail."""
    async with asyncio.timeout(60):
        while (await ask(channel, 2 * len(numbers))).keys() != {*numbers}:
            pass


async def test_a_replica_that_is_added_gets_calls(replicas: _Replicas) -> None:
    await replicas.start(1)
    async with replicas.opened() as channel:
        assert await ask(channel, 4) == {1: 4}
        await replicas.start(2)
        await _until_answered_by(channel, 1, 2)


async def test_one_that_was_away_at_a_look_up_is_called_when_it_is_back(
    replicas: _Replicas,
) -> None:
    """The one that stayed then leaves: with gRPC's own look-ups, all calls failed."""
    await replicas.start(1)
    await replicas.start(2)
    async with replicas.opened() as channel:
        await _until_answered_by(channel, 1, 2)
        await replicas.stop(2)
        await replicas.have_looked(3)
        await replicas.start(2)
        replicas.found.remove(2)  # the name server is late, even
        await _until_answered_by(channel, 1, 2)
        async with asyncio.TaskGroup() as tasks:
            replicas.asking = True
            leaving = tasks.create_task(replicas.stop(1))
            while not leaving.done():
                await ask(channel, 1)
            replicas.asking = False


async def test_a_replica_that_starts_anew_at_another_address_is_found(
    replicas: _Replicas,
) -> None:
    await replicas.start(1)
    async with replicas.opened() as channel:
        assert await ask(channel, 1) == {1: 1}
        await replicas.stop(1)
        with pytest.raises(grpc.aio.AioRpcError):
            await ask(channel, 1)
        await replicas.start(3)
        answered: Counter[int] = Counter()
        async with asyncio.timeout(60):
            while not answered:
                with suppress(grpc.aio.AioRpcError):  # not found yet
                    answered = await ask(channel, 1)
        assert answered == {3: 1}


async def test_a_name_server_that_is_away_changes_nothing(replicas: _Replicas) -> None:
    await replicas.start(1)
    await replicas.start(2)
    async with replicas.opened() as channel:
        await _until_answered_by(channel, 1, 2)
        replicas.error = OSError("no name server answers")
        await replicas.have_looked(3)
        await _until_answered_by(channel, 1, 2)


async def test_calls_that_run_stay_where_they_are(replicas: _Replicas) -> None:
    await replicas.start(1)
    async with replicas.opened() as channel:
        health: Any = channel
        watch = health.unary_stream("/grpc.health.v1.Health/Watch")(b"")
        assert await watch.read()
        await replicas.start(2)
        await _until_answered_by(channel, 1, 2)
        assert not watch.done()
        watch.cancel()


def _has(things: list[float], number: int) -> bool:
    return len(things) == number


async def test_the_name_is_looked_up_every_second(replicas: _Replicas) -> None:
    await replicas.start(1)
    ticks: asyncio.Queue[None] = asyncio.Queue()
    asked_for: list[float] = []

    async def sleep(seconds: float) -> None:
        asked_for.append(seconds)
        await ticks.get()

    target = f"kvmeta:{replicas.port}"
    async with open_replicated_channel(target, look_up=replicas.look_up, sleep=sleep):
        for looks in range(1, 5):
            await poll(partial(_has, asked_for, looks))
            assert replicas.looks == looks
            ticks.put_nowait(None)
    assert set(asked_for) == {1.0}


async def test_a_system_without_threads_to_spare_changes_nothing(replicas: _Replicas) -> None:
    await replicas.start(1)
    async with replicas.opened() as channel:
        replicas.error = RuntimeError("can't start new thread")
        await replicas.have_looked(3)
        assert await ask(channel, 1) == {1: 1}
        replicas.error = None
        await replicas.start(2)
        await _until_answered_by(channel, 1, 2)


async def test_the_bodys_own_error_is_the_one_that_leaves(replicas: _Replicas) -> None:
    await replicas.start(1)
    with pytest.raises(KeyError, match="the body's own"):
        async with replicas.opened():
            raise KeyError("the body's own")


async def test_a_name_server_that_hangs_does_not_keep_the_channel_from_opening() -> None:
    async def hang(host: str) -> Collection[str]:
        await asyncio.Event().wait()
        return ()

    async with _replicas_on_localhost() as port:
        target = f"localhost:{port}"
        async with open_replicated_channel(target, look_up=hang) as channel:
            assert await ask(channel, 1) == {1: 1}


@asynccontextmanager
async def _replicas_on_localhost() -> AsyncIterator[int]:
    replicas = _Replicas()
    await replicas.start(1)
    yield replicas.port
    await replicas.aclose()


@pytest.mark.parametrize("host", ["127.0.0.1", "dns:///127.0.0.1", "ipv4:127.0.0.1"])
async def test_an_address_is_not_looked_up(replicas: _Replicas, host: str) -> None:
    await replicas.start(1)
    async with open_replicated_channel(
        f"{host}:{replicas.port}",
        look_up=replicas.look_up,
        sleep=lambda seconds: asyncio.sleep(0),
    ) as channel:
        assert await ask(channel, 3) == {1: 3}
    assert replicas.looks == 0


@pytest.mark.parametrize(
    ("environment", "through"),
    [
        ({}, False),
        ({"http_proxy": "http://proxy:3128"}, True),
        ({"grpc_proxy": "http://proxy:3128"}, True),
        ({"HTTP_PROXY": "http://proxy:3128"}, False),
        ({"http_proxy": "http://proxy:3128", "no_proxy": "db.example,.svc"}, False),
        ({"http_proxy": "http://proxy:3128", "no_proxy": "db.example"}, True),
        ({"http_proxy": "http://proxy:3128", "no_proxy": "*", "no_grpc_proxy": "db"}, True),
    ],
)
def test_a_proxy_gets_the_name(environment: dict[str, str], through: bool) -> None:
    assert has_proxy("kvmeta.kvloop.svc", environment) is through


async def test_a_name_with_a_proxy_is_not_looked_up(
    replicas: _Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    await replicas.start(1)
    async with replicas.opened() as channel:
        with pytest.raises(grpc.aio.AioRpcError, match=r"127\.0\.0\.1:1"):
            await ask(channel, 1)
    assert replicas.looks == 0


async def test_addresses_of_a_name_without_a_proxy_have_none_either(
    replicas: _Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "kvmeta")
    await replicas.start(1)
    async with replicas.opened() as channel:
        assert await ask(channel, 1) == {1: 1}


async def test_a_url_is_no_target() -> None:
    with pytest.raises(InvalidFieldError, match="is a URL"):
        async with open_replicated_channel("http://kvmeta:1"):
            pass
