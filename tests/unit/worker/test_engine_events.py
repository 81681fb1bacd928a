"""The engine's end of the event socket: never blocks, never loses, reconnects."""

from __future__ import annotations

import json
import queue
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from services.worker import engine_events
from services.worker.engine_events import EngineEvents


@contextmanager
def _listener(path: Path) -> Iterator[socket.socket]:
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(10)
        yield listener


@contextmanager
def _accept(listener: socket.socket) -> Iterator[tuple[socket.socket, Iterator[Any]]]:
    connection, _ = listener.accept()
    connection.settimeout(10)
    with connection, connection.makefile("rb") as lines:
        yield connection, (json.loads(line) for line in lines)


def _greeting(lines: Iterator[Any]) -> Any:
    """Take the two lines that begin every connection; returns the pins."""
    assert next(lines)["type"] == "hello"
    pins = next(lines)
    assert pins["type"] == "pins"
    return pins["pins"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.sock"


@contextmanager
def _events(path: Path) -> Iterator[EngineEvents]:
    events = EngineEvents(str(path), {"engine_id": "e"})
    try:
        yield events
    finally:
        events.close()


def test_hello_comes_first_and_events_follow_in_order(path: Path) -> None:
    with _listener(path) as listener, _events(path) as events:
        for number in range(100):
            events.send({"type": "finished", "number": number})
        with _accept(listener) as (_, lines):
            assert next(lines) == {"type": "hello", "engine_id": "e"}
            assert next(lines) == {"type": "pins", "pins": []}
            assert [next(lines)["number"] for _ in range(100)] == list(range(100))


def test_events_sent_before_the_sidecar_listens_arrive(path: Path) -> None:
    with _events(path) as events:
        events.send({"type": "finished", "number": 1})
        with _listener(path) as listener, _accept(listener) as (_, lines):
            _greeting(lines)
            assert next(lines)["number"] == 1


def test_new_sidecar_gets_a_hello_and_later_events(path: Path) -> None:
    with _events(path) as events:
        for generation in range(3):
            with _listener(path) as listener, _accept(listener) as (_, lines):
                _greeting(lines)
                events.send({"type": "finished", "number": generation})
                assert next(lines)["number"] == generation


def test_event_is_as_it_was_when_sent(path: Path) -> None:
    with _listener(path) as listener, _events(path) as events:
        params = {"remote_block_ids": [[1, 2]]}
        events.send({"type": "finished", "params": params})
        params["remote_block_ids"].clear()
        with _accept(listener) as (_, lines):
            _greeting(lines)
            assert next(lines)["params"] == {"remote_block_ids": [[1, 2]]}


def test_event_of_many_megabytes_arrives_whole(path: Path) -> None:
    with _listener(path) as listener, _events(path) as events:
        events.send({"type": "finished", "digests": "x" * 5_000_000})
        with _accept(listener) as (_, lines):
            _greeting(lines)
            assert len(next(lines)["digests"]) == 5_000_000


def test_releases_are_taken_once_whatever_the_packets_look_like(path: Path) -> None:
    with _listener(path) as listener, _events(path) as events, _accept(listener) as (peer, lines):
        _greeting(lines)
        message = b'{"type":"release","request_ids":["a","b"]}\n'
        for byte in (message * 2)[:-1]:
            peer.sendall(bytes([byte]))
        peer.sendall(b'\nnot json\n{"type":"release"}\n{"type":"unknown"}\n[]\n')
        peer.sendall(b'{"type":"release","request_ids":["last"]}\n')
        taken: list[str] = []
        while "last" not in taken:
            taken += events.take_releases()
        assert taken == ["a", "b", "a", "b", "last"]
        assert events.take_releases() == []


def test_renewals_are_taken_once_and_only_whole_lines_count(path: Path) -> None:
    with _listener(path) as listener, _events(path) as events, _accept(listener) as (peer, lines):
        _greeting(lines)
        peer.sendall(b'{"type":"renew","pins":[["a",60],["b",1.5]]}\n')
        peer.sendall(b'{"type":"renew","pins":[["x",60],["y"]]}\n{"type":"renew","pins":[[]]}\n')
        peer.sendall(b'{"type":"renew","pins":[["last",60]]}\n')
        taken: list[tuple[str, float]] = []
        while ("last", 60.0) not in taken:
            taken += events.take_renewals()
        assert taken == [("a", 60.0), ("b", 1.5), ("last", 60.0)]
        assert events.take_renewals() == []


def test_each_connection_begins_with_what_is_retained_then(path: Path) -> None:
    retained: list[dict[str, Any]] = []
    events = EngineEvents(str(path), {}, pins=lambda: list(retained))
    try:
        for count in range(3):
            with _listener(path) as listener, _accept(listener) as (_, lines):
                assert len(_greeting(lines)) == count
                retained.append({"request_id": str(count)})
    finally:
        events.close()


def test_requests_of_the_sidecar_are_announced_once_they_can_be_taken(path: Path) -> None:
    seen: queue.Queue[list[str]] = queue.Queue()
    events = EngineEvents(str(path), {}, on_request=lambda: seen.put(events.take_releases()))
    try:
        with _listener(path) as listener, _accept(listener) as (peer, lines):
            _greeting(lines)
            peer.sendall(b'not json\n{"type":"release","request_ids":["a"]}\n')
            assert seen.get(timeout=10) == ["a"]
            assert seen.empty()
    finally:
        events.close()


def test_oldest_events_are_dropped_when_no_sidecar_ever_comes(path: Path, monkeypatch) -> None:
    monkeypatch.setattr(engine_events, "MAX_QUEUED", 10)
    with _events(path) as events:
        for number in range(25):
            events.send({"type": "finished", "number": number})
        with _listener(path) as listener, _accept(listener) as (_, lines):
            _greeting(lines)
            assert [next(lines)["number"] for _ in range(10)] == list(range(15, 25))


def test_close_sends_what_is_queued(path: Path) -> None:
    with _listener(path) as listener:
        events = EngineEvents(str(path), {})
        with _accept(listener) as (_, lines):
            _greeting(lines)
            events.send({"type": "finished", "number": 1})
            events.close()
            assert [line["number"] for line in lines] == [1]


def test_close_without_a_sidecar_returns(path: Path) -> None:
    events = EngineEvents(str(path), {})
    events.send({"type": "finished"})
    events.close()
