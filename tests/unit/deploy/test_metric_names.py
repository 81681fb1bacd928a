"""What alerts, dashboard and docs ask Prometheus for is what services tell it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.unit.deploy.promtool import promtool
from tests.unit.deploy.queries import ROOT, label_values, metric_names, queries
from tests.unit.docs.metrics_document import LABEL_VALUES, services

_BY_PROMETHEUS = {"job", "instance"}
_OF_A_SERVICE = re.compile(r"\bkvloop_(?:router|kvmeta|worker|rpc)_\w+")


def _samples() -> dict[str, str]:
    """Family by the name under which Prometheus stores its samples."""
    return {
        sample: family.family.name
        for families in services().values()
        for family in families
        for sample in family.samples
    }


@pytest.mark.parametrize(("where", "query"), list(queries()))
def test_a_query_reads_metrics_and_labels_that_exist(where: str, query: str) -> None:
    samples = _samples()

    assert metric_names(query) <= samples.keys(), where
    for metric, label, value in label_values(query):
        if label not in _BY_PROMETHEUS:
            assert f"`{value}`" in LABEL_VALUES[samples[metric], label], where


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_a_page_names_metrics_that_exist(page: Path) -> None:
    families = set(_samples().values())
    named = set(_OF_A_SERVICE.findall(page.read_text()))

    assert named <= _samples().keys() | families


def test_queries_are_found_in_all_three_places() -> None:
    places = [where for where, _ in queries()]

    assert places.count("docs/metrics.md") >= 5
    assert "KvloopReuseStopped" in places
    assert "Time to first token" in places


def test_every_query_parses(tmp_path) -> None:
    rules = tmp_path / "rules.yml"
    records = [
        {"record": f"kvloop:query_{number}", "expr": query}
        for number, (_, query) in enumerate(queries())
    ]
    rules.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": records}]}))

    checked = promtool("check", "rules", str(rules))

    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(records)} rules found" in checked.stdout + checked.stderr
