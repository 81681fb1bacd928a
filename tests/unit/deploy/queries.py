"""The PromQL that is shipped: in alert rules, on the dashboard, in the docs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "dashboards" / "kvloop.json"
METRICS_PAGE = ROOT / "docs" / "metrics.md"

_OURS = re.compile(r"\b(?:kvloop_\w+|process_\w+)\b")
_SELECTOR = re.compile(r"(?P<metric>kvloop_\w+)\{(?P<matchers>[^}]*)\}")
_MATCHER = re.compile(r'(?P<label>\w+)\s*(?:=~|!~|!=|=)\s*"(?P<values>[^"]*)"')


def dashboard() -> dict[str, Any]:
    """The dashboard as it is shipped."""
    found: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return found


def queries() -> Iterator[tuple[str, str]]:
    """Each query with where it stands."""
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"].replace("$__rate_interval", "5m")
    for match in re.finditer(r"^\| .+ \| `(.+)` \|$", METRICS_PAGE.read_text(), re.MULTILINE):
        yield "docs/metrics.md", match[1].replace("\\|", "|")


def metric_names(query: str) -> set[str]:
    """Metrics of ours that a query reads."""
    return set(_OURS.findall(query))


def label_values(query: str) -> Iterator[tuple[str, str, str]]:
    """Metric, label and value of each condition on our metrics."""
    for selector in _SELECTOR.finditer(query):
        for matcher in _MATCHER.finditer(selector["matchers"]):
            for value in matcher["values"].split("|"):
                yield selector["metric"], matcher["label"], value
