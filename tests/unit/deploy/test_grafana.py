"""The dashboard has the form that Grafana loads, and its provisioning leads to it."""

from __future__ import annotations

import itertools
from typing import Any

import yaml

from tests.unit.deploy.queries import DASHBOARD, ROOT, dashboard

FOLDER = ROOT / "deploy" / "grafana"
IN_CONTAINER = "/etc/grafana/provisioning"
COLUMNS = 24


def _panels() -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = dashboard()["panels"]
    return panels


def _cells(panel: dict[str, Any]) -> set[tuple[int, int]]:
    place = panel["gridPos"]
    columns = range(place["x"], place["x"] + place["w"])
    rows = range(place["y"], place["y"] + place["h"])
    return set(itertools.product(columns, rows))


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    panels = _panels()
    cells = [cell for panel in panels for cell in _cells(panel)]

    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len(set(cells)) == len(cells)
    assert all(0 <= column < COLUMNS for column, _ in cells)


def test_every_chart_says_what_it_shows_and_in_which_unit() -> None:
    charts = [panel for panel in _panels() if panel["type"] != "row"]

    for chart in charts:
        assert chart["title"]
        assert chart["description"].endswith(".")
        assert chart["fieldConfig"]["defaults"]["unit"]
        assert chart["targets"]
        references = [target["refId"] for target in chart["targets"]]
        assert len(set(references)) == len(references)
    assert len({chart["title"] for chart in charts}) == len(charts)


def test_every_chart_asks_the_data_source_that_the_reader_chose() -> None:
    (variable,) = dashboard()["templating"]["list"]
    chosen = {"type": "prometheus", "uid": f"${{{variable['name']}}}"}

    for panel in _panels():
        if panel["type"] != "row":
            assert panel["datasource"] == chosen
            assert all(target["datasource"] == chosen for target in panel["targets"])


def test_provisioning_leads_to_prometheus_and_to_the_dashboard() -> None:
    (source,) = yaml.safe_load((FOLDER / "datasources" / "prometheus.yml").read_text())[
        "datasources"
    ]
    (provider,) = yaml.safe_load((FOLDER / "dashboards" / "provider.yml").read_text())["providers"]
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    (variable,) = dashboard()["templating"]["list"]

    assert source["uid"] == variable["current"]["value"]
    assert source["url"] == "http://prometheus:9090"
    assert compose["grafana"]["volumes"] == [f"./deploy/grafana:{IN_CONTAINER}:ro"]
    folder = provider["options"]["path"].replace(IN_CONTAINER, str(FOLDER))
    assert folder == str(DASHBOARD.parent)


def test_the_dashboard_can_be_replaced_by_its_own_export() -> None:
    found = dashboard()

    assert found["uid"] == "kvloop"
    assert "id" not in found, "an id belongs to one Grafana"
    assert found["schemaVersion"] >= 36
