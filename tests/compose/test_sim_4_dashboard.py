"""After all that load, the dashboard has something to show in every chart."""

from __future__ import annotations

import pytest

from tests.compose import prometheus
from tests.compose.load import load
from tests.compose.stack import Stack
from tests.unit.deploy.queries import dashboard, queries

pytestmark = pytest.mark.timeout(600)
_CHARTS = {panel["title"] for panel in dashboard()["panels"] if panel["type"] != "row"}
_OF_TROUBLE = {"Evictions, by reason", "Errors, by reason"}
"""Charts that are empty as long as nothing is amiss."""


async def test_prometheus_answers_every_query_and_no_chart_is_empty(sim_stack: Stack) -> None:
    async with load(sim_stack, "sim", "dashboard") as tally:
        await tally.more(4)

    filled = {where for where, query in queries() if await prometheus.query(sim_stack, query)}

    assert _CHARTS - filled - _OF_TROUBLE == set()
