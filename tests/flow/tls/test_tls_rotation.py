"""Certificates that are replaced under calls that run."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvloop import rpc
from kvloop.rotation import RotatingAioChannel
from kvloop.tls import ClientTls, ClientTlsFiles
from services.common.tls import ServerTls
from services.router.spare_calls import SpareCall
from tests.flow.sim.engines import poll
from tests.flow.tls import echo
from tests.flow.tls.authority import Authority
from tests.flow.tls.echo import Echo
from tests.free_ports import held_port


class _Clock:
    """A clock that a test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> _Clock:
    return _Clock()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@asynccontextmanager
async def _serving(authority: Authority, clock: _Clock) -> AsyncIterator[Echo]:
    files = authority.server(authority.issue("server"))
    async with echo.serve(ServerTls(files, clock=clock)) as server:
        yield server


def _channel(server: Echo, tls: ClientTlsFiles) -> RotatingAioChannel[ClientTls]:
    channel = rpc.make_aio_channel(f"127.0.0.1:{server.port}", tls)
    assert isinstance(channel, RotatingAioChannel)
    return channel


def _let_a_stranger_issue(authority: Authority, folder: Path, clock: _Clock) -> None:
    """Replace the client's certificate by one that no server takes."""
    folder.mkdir()
    stranger = Authority(folder)
    stranger.folder = authority.folder
    stranger.issue("router", "stranger.kvloop")
    clock.now += 2


async def _until_called_as(channel: grpc.aio.Channel, names: str) -> None:
    """Make calls until the server knows the caller by other names; none may fail."""
    while names not in await echo.who(channel):
        pass


async def test_calls_after_a_change_use_the_new_certificate_and_streams_go_on(
    authority: Authority, clock: _Clock
) -> None:
    client = authority.issue("router", "before.kvloop")
    async with (
        _serving(authority, clock) as server,
        _channel(server, authority.client(client, clock=clock)) as channel,
    ):
        stream: Any = channel.unary_stream(echo.TICK)(b"")
        await server.ticks.put(b"one")
        assert await stream.read() == b"one"
        assert await echo.who(channel) == "before.kvloop,router.kvloop"

        authority.issue("router", "after.kvloop")
        clock.now += 2
        await _until_called_as(channel, "after.kvloop")

        await server.ticks.put(b"two")
        assert await stream.read() == b"two"
        await server.ticks.put(b"end")
        assert await stream.read() is grpc.aio.EOF


async def test_a_whole_new_authority_comes_in_without_a_failed_call(
    authority: Authority, clock: _Clock, tmp_path: Path
) -> None:
    """Trust both, show the new, trust the new alone: each step may come late anywhere."""
    client = authority.issue("router", "before.kvloop")
    async with (
        _serving(authority, clock) as server,
        _channel(server, authority.client(client, clock=clock)) as channel,
    ):
        stream: Any = channel.unary_stream(echo.TICK)(b"")
        assert "before.kvloop" in await echo.who(channel)

        (tmp_path / "other").mkdir()
        other = Authority(tmp_path / "other")
        authority.file.write_bytes(authority.pem + other.pem)
        clock.now += 2
        await echo.who(channel)

        other.folder = authority.folder
        other.issue("server")
        other.issue("router", "after.kvloop")
        clock.now += 2
        await _until_called_as(channel, "after.kvloop")

        authority.file.write_bytes(other.pem)
        clock.now += 2
        assert "after.kvloop" in await echo.who(channel)
        async with _channel(server, other.client(client)) as newcomer:
            assert "after.kvloop" in await echo.who(newcomer)

        await server.ticks.put(b"still here")
        assert await stream.read() == b"still here"
        await server.ticks.put(b"end")


async def test_a_certificate_that_the_server_refuses_does_no_harm_while_it_takes_the_old_one(
    authority: Authority, clock: _Clock, tmp_path: Path
) -> None:
    client = authority.issue("router", "before.kvloop")
    async with (
        _serving(authority, clock) as server,
        _channel(server, authority.client(client, clock=clock)) as channel,
    ):
        assert "before.kvloop" in await echo.who(channel)
        _let_a_stranger_issue(authority, tmp_path / "other", clock)
        for _ in range(20):
            assert "before.kvloop" in await echo.who(channel)

        authority.issue("router", "after.kvloop")
        clock.now += 2
        await _until_called_as(channel, "after.kvloop")


async def test_a_certificate_that_is_refused_does_no_harm_either_when_the_server_starts_anew(
    authority: Authority, clock: _Clock, tmp_path: Path
) -> None:
    client = authority.issue("router", "before.kvloop")
    tls = ServerTls(authority.server(authority.issue("server")), clock=clock)
    async with AsyncExitStack() as exits:
        address = f"127.0.0.1:{held_port()}"
        async with echo.serve(tls, address) as server:
            channel = _channel(server, authority.client(client, clock=clock))
            exits.push_async_callback(channel.close)
            assert "before.kvloop" in await echo.who(channel)
            _let_a_stranger_issue(authority, tmp_path / "other", clock)
            assert "before.kvloop" in await echo.who(channel)
        with pytest.raises(grpc.aio.AioRpcError):
            await echo.who(channel)
        await exits.enter_async_context(echo.serve(tls, address))

        said = ""
        async with asyncio.timeout(20):
            while not said:
                with suppress(grpc.aio.AioRpcError):  # not connected again yet
                    said = await echo.who(channel)
        assert "before.kvloop" in said


async def test_files_that_do_not_fit_together_change_nothing(
    authority: Authority, clock: _Clock
) -> None:
    client = authority.issue("router", "before.kvloop")
    outcomes: list[Exception | None] = []
    tls = authority.client(client, clock=clock, on_read=outcomes.append)
    before = tls.current()
    key = client.key.read_bytes()
    authority.issue("router", "after.kvloop")
    client.key.write_bytes(key)
    clock.now += 2
    assert tls.current() is before
    authority.issue("router", "after.kvloop")
    assert tls.current() is before  # it is looked at once a second at most
    clock.now += 2
    assert tls.current() is not before
    assert [type(outcome).__name__ for outcome in outcomes] == ["SSLError", "NoneType"]


async def test_a_channel_that_was_left_goes_with_its_last_call(
    authority: Authority, clock: _Clock
) -> None:
    client = authority.issue("router", "before.kvloop")
    async with (
        _serving(authority, clock) as server,
        _channel(server, authority.client(client, clock=clock)) as channel,
    ):
        left = weakref.ref(channel.current())
        stream: Any = channel.unary_stream(echo.TICK)(b"")
        authority.issue("router", "after.kvloop")
        clock.now += 2
        await _until_called_as(channel, "after.kvloop")
        gc.collect()
        assert left() is not None
        await server.ticks.put(b"end")
        assert await stream.read() is grpc.aio.EOF
        del stream

        def gone() -> bool:
            gc.collect()
            return left() is None

        await poll(gone)


async def test_closing_ends_calls_on_channels_that_were_left_too(
    authority: Authority, clock: _Clock
) -> None:
    client = authority.issue("router", "before.kvloop")
    async with _serving(authority, clock) as server:
        async with _channel(server, authority.client(client, clock=clock)) as channel:
            stream: Any = channel.unary_stream(echo.TICK)(b"")
            await server.ticks.put(b"one")
            assert await stream.read() == b"one"
            authority.issue("router", "after.kvloop")
            clock.now += 2
            await _until_called_as(channel, "after.kvloop")
        assert await stream.code() is grpc.StatusCode.CANCELLED


async def test_synchronous_channels_rotate_too(authority: Authority, clock: _Clock) -> None:
    client = authority.issue("router", "before.kvloop")
    async with _serving(authority, clock) as server:
        loop = asyncio.get_running_loop()

        def put(tick: bytes) -> None:
            loop.call_soon_threadsafe(server.ticks.put_nowait, tick)

        def talk() -> None:
            tls = authority.client(client, clock=clock)
            with rpc.make_channel(f"127.0.0.1:{server.port}", tls) as channel:
                who: Any = channel.unary_unary(echo.WHO)
                tick: Any = channel.unary_stream(echo.TICK)
                stream = tick(b"", timeout=20)
                put(b"one")
                assert next(stream) == b"one"
                assert who(b"", timeout=20) == b"before.kvloop,router.kvloop"
                authority.issue("router", "after.kvloop")
                clock.now += 2
                assert who(b"", timeout=20) == b"after.kvloop,router.kvloop"
                put(b"two")
                assert next(stream) == b"two"
                put(b"end")
                assert list(stream) == []

        await asyncio.to_thread(talk)


async def test_a_call_that_is_open_ahead_goes_over_to_the_new_certificate(
    authority: Authority, clock: _Clock
) -> None:
    client = authority.issue("router", "before.kvloop")
    async with (
        _serving(authority, clock) as server,
        _channel(server, authority.client(client, clock=clock)) as channel,
    ):
        assert await echo.who(channel) == "before.kvloop,router.kvloop"
        spare = SpareCall(
            channel,
            channel.stream_unary(echo.WHO),
            pause_seconds=0.0,
            look_seconds=0.01,
            max_age_seconds=0.05,
        )
        spare.refill()
        left = weakref.ref(channel.current())
        authority.issue("router", "after.kvloop")
        clock.now += 2
        async with asyncio.timeout(20):
            while left() is not None:
                await _until_called_as(channel, "after.kvloop")
                await asyncio.sleep(0.02)
                gc.collect()
            while (call := spare.take()) is None:
                spare.refill()  # again, if it was given up before it was seen
                await asyncio.sleep(0.02)
        await call.write(b"")
        assert await call == b"after.kvloop,router.kvloop"
        spare.close()
