"""Several processes show one set of metrics, told apart by a label."""

from __future__ import annotations

import socket
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from services.common import metrics_shares


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
