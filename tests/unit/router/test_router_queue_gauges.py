"""Prometheus sees how many turns run and wait now."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry

from services.router.admission import AdmissionLimits, TurnAdmission
from services.router.metrics import RouterMetrics


@asynccontextmanager
async def _turn(admission: TurnAdmission) -> AsyncIterator[None]:
    async with admission.turn("acme", "tiny"):
        yield


@pytest.mark.parametrize("limit", [0, 5])
async def test_running_turns_are_counted_with_and_without_a_limit(limit) -> None:
    registry = CollectorRegistry()
    admission = TurnAdmission(AdmissionLimits(running=limit, waiting=0, wait_seconds=1))
    RouterMetrics(registry).watch_queue(lambda: admission.running, lambda: admission.waiting)

    async with _turn(admission), _turn(admission):
        assert registry.get_sample_value("kvloop_router_running_turns") == 2
        assert registry.get_sample_value("kvloop_router_waiting_turns") == 0
    with pytest.raises(RuntimeError):
        async with _turn(admission):
            raise RuntimeError

    assert registry.get_sample_value("kvloop_router_running_turns") == 0
