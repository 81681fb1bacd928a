"""Several processes show one set of metrics, told apart by a label."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from services.common import metrics_shares

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine nobody is left out who answers."""
    monkeypatch.setattr(metrics_shares, "_ANSWER_SECONDS", 60.0)


def _registry(turns: int) -> CollectorRegistry:
    registry = CollectorRegistry()
    Counter("turns", "Turns.", ["outcome"], registry=registry).labels("ok").inc(turns)
    Gauge("running", "Now.", registry=registry).set_function(lambda: turns)
    Histogram("seconds", "Time.", registry=registry, buckets=(1.0,)).observe(0.5)
    return registry


def test_every_kind_of_metric_has_the_process_as_a_label(tmp_path: Path) -> None:
    with (
        metrics_shares.share(_registry(3), tmp_path, 0),
        metrics_shares.share(_registry(5), tmp_path, 1),
    ):
        shown = metrics_shares.of_all(tmp_path)
        for process, turns in (("0", 3), ("1", 5)):
            labels = {"process": process}
            assert shown.get_sample_value("turns_total", {"outcome": "ok", **labels}) == turns
            assert shown.get_sample_value("running", labels) == turns
            assert shown.get_sample_value("seconds_bucket", {"le": "1.0", **labels}) == 1
        assert generate_latest(shown).count(b"# TYPE turns_total counter") == 1


def test_a_process_that_has_ended_or_died_is_left_out(tmp_path: Path) -> None:
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(tmp_path / "1.metrics"))  # and nobody listens
    with metrics_shares.share(_registry(3), tmp_path, 0):
        shown = metrics_shares.of_all(tmp_path)
        assert shown.get_sample_value("running", {"process": "0"}) == 3
        assert shown.get_sample_value("running", {"process": "1"}) is None
    assert shown.get_sample_value("running", {"process": "0"}) is None
    dead.close()


def test_a_process_that_is_started_anew_takes_its_place(tmp_path: Path) -> None:
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(tmp_path / "0.metrics"))
    dead.close()  # the file stays, as after kill -9
    with metrics_shares.share(_registry(7), tmp_path, 0):
        shown = metrics_shares.of_all(tmp_path)
        assert shown.get_sample_value("running", {"process": "0"}) == 7


@contextmanager
def _answers(path: Path, pieces: list[bytes], *, pause: float = 0.0) -> Iterator[None]:
    """A process that answers the next who asks with these pieces, and ends."""

    def answer() -> None:
        asker, _ = listener.accept()
        with asker:
            for piece in pieces:
                try:
                    asker.sendall(piece)
                except OSError:  # it waits no longer
                    return
                time.sleep(pause)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = Thread(target=answer)
        thread.start()
        try:
            yield
        finally:
            thread.join()


@pytest.mark.parametrize(
    "left", [b"# TYPE running gauge\nrunning 1", b"# TYPE running gauge\nrunn"]
)
def test_a_process_that_dies_while_it_answers_is_left_out(tmp_path: Path, left: bytes) -> None:
    with (
        metrics_shares.share(_registry(3), tmp_path, 0),
        _answers(tmp_path / "1.metrics", [left]),
    ):
        text = generate_latest(metrics_shares.of_all(tmp_path)).decode()
    assert 'running{process="0"} 3.0' in text
    assert 'process="1"' not in text


def test_one_that_answers_too_slowly_neither_holds_up_nor_hides_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_shares, "_ANSWER_SECONDS", 4.0)
    drops = [b"# HELP slow More and more.\n"] * 600  # for 60 s
    with (
        metrics_shares.share(_registry(3), tmp_path, 1),
        _answers(tmp_path / "0.metrics", [*drops, b"# EOF\n"], pause=0.1),
    ):
        start = time.monotonic()
        shown = metrics_shares.of_all(tmp_path)
        assert shown.get_sample_value("running", {"process": "1"}) == 3
        assert time.monotonic() - start < 30


def test_one_who_asks_and_reads_nothing_does_not_hold_up_the_end(tmp_path: Path) -> None:
    registry = _registry(3)
    asked = Counter("asked", "Long." * 1_000_000, registry=registry)
    asked.inc()
    with socket.socket(socket.AF_UNIX) as asker:
        with metrics_shares.share(registry, tmp_path, 0):
            asker.connect(str(tmp_path / "0.metrics"))
            assert asker.recv(1)  # it answers, and cannot end
        asker.close()


def test_a_folder_whose_path_is_too_long_for_sockets_is_refused(tmp_path: Path) -> None:
    room = 107 - len(str(tmp_path)) - len("//10.metrics")
    fits, too_long = (tmp_path / ("x" * length) for length in (room, room + 1))
    for folder in (fits, too_long):
        folder.mkdir()
    metrics_shares.check_folder(fits, 11)
    with metrics_shares.share(_registry(3), fits, 10):
        pass
    metrics_shares.check_folder(too_long, 10)
    with pytest.raises(metrics_shares.FolderTooLongError, match="by 1 bytes; set TMPDIR"):
        metrics_shares.check_folder(too_long, 11)
