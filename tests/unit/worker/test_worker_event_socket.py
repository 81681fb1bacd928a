"""The event socket, over a real Unix socket."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import uvloop

from services.worker import events
from services.worker.engine_events import EngineEvents
from services.worker.event_hub import EngineLink, EventHub
from services.worker.event_messages import (
    Freed,
    Message,
    Pins,
    Pressure,
    Renewed,
    RenewedPin,
    RetainedPin,
)
from services.worker.metrics import WorkerMetrics
from services.worker.pins import ReleaseCause
from tests.unit.worker.fake_events_client import connect, connect_silently
from tests.unit.worker.fakes import ENGINE, FakeClock, hello, until


@pytest.fixture
def metrics() -> WorkerMetrics:
    return WorkerMetrics()


@pytest.fixture
def hub(metrics: WorkerMetrics) -> EventHub:
    return EventHub(FakeClock(), metrics)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "events.sock"


@pytest.fixture
async def listening(path: Path, hub: EventHub, metrics: WorkerMetrics) -> AsyncIterator[None]:
    async with events.listen(path, hub, metrics):
        yield


@pytest.mark.usefixtures("listening")
async def test_hello_makes_the_engine_known(path: Path, hub: EventHub) -> None:
    async with connect(path, vllm_version="0.25.1"):
        found = await hub.identity_after(None)
    assert found == hello(vllm_version="0.25.1")


@pytest.mark.usefixtures("listening")
async def test_params_are_sliced_out_of_the_line_byte_for_byte(path: Path, hub: EventHub) -> None:
    params = b'{ "remote_request_id":"r", "ids":[[1, 2]],"t":1.50,"u":"\\u00e9","n":null }'
    line = (
        b'{"type":"finished","turn_id":"t","retained":true,"num_tokens":9,"num_blocks":1,'
        b'"ttl_seconds":480,"future":[1],"params":' + params + b"}\n"
    )
    with hub.watch("t") as watch:
        async with connect(path) as client:
            await client.send_raw(line[:50])
            await client.send_raw(line[50:])
            turn = await watch.finished()
        watch.claim()
    assert turn.params == params
    assert turn.ttl_seconds == 480


@pytest.mark.usefixtures("listening")
async def test_a_line_of_several_mebibytes_arrives(path: Path, hub: EventHub) -> None:
    params = json.dumps({"remote_request_id": "r", "ids": list(range(1_000_000))}).encode()
    with hub.watch("turn-1") as watch:
        async with connect(path) as client:
            await client.finish("turn-1", params=msgspec.Raw(params))
            turn = await watch.finished()
        watch.claim()
    assert turn.params == params


@pytest.mark.usefixtures("listening")
async def test_releases_reach_the_connector(path: Path, hub: EventHub) -> None:
    async with connect(path) as client:
        await hub.identity_after(None)
        hub.release(ENGINE, ["a", "b"], ReleaseCause.ENDED)
        assert await client.release() == ["a", "b"]


@pytest.mark.usefixtures("listening")
async def test_renewals_reach_the_connector(path: Path, hub: EventHub) -> None:
    async with connect(path) as client:
        await hub.identity_after(None)
        hub.renew(ENGINE, [("a", 60.0), ("b", 12.5)])
        assert await client.renew() == [["a", 60.0], ["b", 12.5]]


@pytest.mark.usefixtures("listening")
async def test_what_the_connector_says_of_pins_is_understood(path: Path, hub: EventHub) -> None:
    held = (
        b'{"type":"pins","pins":[{"request_id":"r","turn_id":"t","num_tokens":64,"num_blocks":2,'
        b'"remaining_seconds":40.5,"extension_seconds":0,"age_seconds":20,"future":1}]}\n'
    )
    lines = [
        b'{"type":"renewed","pins":[{"request_id":"r","remaining_seconds":60.0,'
        b'"extension_seconds":19.5}]}\n',
        b'{"type":"pressure","blocks_needed":7}\n',
        b'{"type":"freed","request_ids":["r"]}\n',
    ]
    heard: list[Message] = []
    hub.listen(heard.append)
    async with connect(path) as client:
        await client.send_raw(held)
        await until(lambda: len(hub.pins) == 1)
        await client.send_raw(b"".join(lines))
        await until(lambda: len(hub.pins) == 0)
    assert heard == [
        Pins([RetainedPin("r", "t", 64, 2, 40.5, 0, 20)]),
        Renewed([RenewedPin("r", 60.0, 19.5)]),
        Pressure(7),
        Freed(["r"]),
    ]


@pytest.mark.usefixtures("listening")
async def test_a_connector_may_go_and_come_back(path: Path, hub: EventHub) -> None:
    async with connect(path):
        await hub.identity_after(None)
    async with connect(path, epoch="epoch-2") as client:
        await hub.identity_after(ENGINE)
        with hub.watch("turn-1") as watch:
            await client.finish("turn-1", retained=False)
            assert (await watch.finished()).engine.epoch == "epoch-2"


@pytest.mark.usefixtures("listening")
@pytest.mark.parametrize("line", [b"nonsense\n", b'{"type":"future"}\n', b'{"turn_id":1}\n', b"\n"])
async def test_lines_that_cannot_be_read_are_counted_and_skipped(
    path: Path, hub: EventHub, metrics: WorkerMetrics, line: bytes
) -> None:
    with hub.watch("turn-1") as watch:
        async with connect(path) as client:
            await client.send_raw(line)
            await client.finish("turn-1", retained=False)
            await watch.finished()
    count = metrics.registry.get_sample_value("kvloop_worker_event_lines_unreadable_total")
    assert count == 1


@pytest.mark.usefixtures("listening")
async def test_who_does_not_say_hello_first_is_sent_away(path: Path, hub: EventHub) -> None:
    async with connect_silently(path) as client:
        await client.finish("turn-1")
        assert await client.at_end()
    assert hub.identity is None


async def test_a_line_beyond_the_limit_ends_the_connection(
    path: Path, hub: EventHub, metrics: WorkerMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MAX_LINE_BYTES", 4096)
    async with events.listen(path, hub, metrics), connect(path) as client:
        await hub.identity_after(None)
        await client.send_raw(b"x" * 20_000 + b"\n")
        assert await client.at_end()
    count = metrics.registry.get_sample_value("kvloop_worker_event_lines_unreadable_total")
    assert count == 1


@pytest.mark.usefixtures("listening")
async def test_the_engines_own_client_and_this_server_understand_each_other(
    path: Path, hub: EventHub
) -> None:
    client = EngineEvents(str(path), msgspec.structs.asdict(hello()))
    try:
        assert await hub.identity_after(None) == hello()
        with hub.watch("turn-1") as watch:
            client.send(
                {
                    "type": "finished",
                    "turn_id": "turn-1",
                    "retained": True,
                    "num_tokens": 9,
                    "num_blocks": 1,
                    "ttl_seconds": 480.0,
                    "params": {"remote_request_id": "r", "ids": [[1, 2]], "none": None},
                }
            )
            turn = await watch.finished()
            watch.claim()
        assert turn.params == b'{"remote_request_id":"r","ids":[[1,2]],"none":null}'
        hub.release_turn(turn, ReleaseCause.NOT_STORED)
        await until(lambda: client.take_releases() == ["r"])
    finally:
        await asyncio.to_thread(client.close)


@pytest.mark.usefixtures("listening")
async def test_only_the_owner_may_connect(path: Path) -> None:
    assert _mode(path) == 0o600
    assert _mode(path.parent) == 0o700


async def test_the_socket_is_gone_afterwards_and_connections_end(
    path: Path, hub: EventHub, metrics: WorkerMetrics
) -> None:
    async with events.listen(path, hub, metrics):
        connection = connect(path)
        client = await connection.__aenter__()
        await hub.identity_after(None)
    assert not _exists(path)
    assert await client.at_end()
    await connection.__aexit__(None, None, None)


async def test_a_socket_left_behind_is_replaced(
    path: Path, hub: EventHub, metrics: WorkerMetrics
) -> None:
    _leave_socket(path)
    async with events.listen(path, hub, metrics), connect(path):
        await hub.identity_after(None)


async def test_two_sidecars_cannot_share_a_socket(
    path: Path, hub: EventHub, metrics: WorkerMetrics
) -> None:
    async with events.listen(path, hub, metrics):
        with pytest.raises(OSError, match="another process listens"):
            async with events.listen(path, hub, metrics):
                pass
        async with connect(path):
            await hub.identity_after(None)


async def test_a_file_in_the_way_is_left_alone(
    path: Path, hub: EventHub, metrics: WorkerMetrics
) -> None:
    _write(path, "precious")
    with pytest.raises(OSError, match="not a socket"):
        async with events.listen(path, hub, metrics):
            pass
    assert _read(path) == "precious"


async def test_a_path_too_long_for_a_socket_is_refused_with_the_limit(
    tmp_path: Path, hub: EventHub, metrics: WorkerMetrics
) -> None:
    length = 107 - len(os.fsencode(tmp_path)) - 1
    longest, too_long = tmp_path / ("x" * length), tmp_path / ("x" * (length + 1))
    async with events.listen(longest, hub, metrics):
        assert _exists(longest)
    with pytest.raises(OSError, match="107 bytes"):
        async with events.listen(too_long, hub, metrics):
            pass


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def _exists(path: Path) -> bool:
    return path.exists()


def _read(path: Path) -> str:
    return path.read_text()


def _write(path: Path, text: str) -> None:
    path.parent.mkdir()
    path.write_text(text)


def _leave_socket(path: Path) -> None:
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))


def test_what_is_sent_to_a_connection_that_has_just_broken_is_lost_without_an_error(
    path: Path, hub: EventHub, metrics: WorkerMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvloop lets nobody write to it; the renewals of all other pins must go on."""
    links: list[EngineLink] = []
    monkeypatch.setattr(hub, "connected", lambda _, link: links.append(link))

    async def scenario() -> None:
        async with events.listen(path, hub, metrics):
            async with connect(path):
                await until(lambda: links)
                links[0].send_renew([("r", 30.0)])
            await asyncio.sleep(0.05)
            for _ in range(3):  # the first one may still be taken
                links[0].send_release(["r"])
                links[0].send_renew([("r", 30.0)])
                await asyncio.sleep(0.01)

    uvloop.run(scenario())
