"""Every service is restarted under load, and no request fails."""

from __future__ import annotations

import asyncio

import pytest

from tests.compose.commands import docker
from tests.compose.load import load
from tests.compose.stack import Stack

pytestmark = pytest.mark.timeout(1200)
_TURNS = 2
"""Of each kind of client, before and after."""


@pytest.mark.parametrize("service", ["router", "kvmeta", "prefill", "decode"])
async def test_a_service_is_restarted_one_by_one_and_no_request_fails(
    sim_stack: Stack, service: str
) -> None:
    async with load(sim_stack, "sim", f"restarted-{service}") as tally:
        await tally.more(_TURNS)
        for container in sim_stack.containers(service):
            before = tally.answered.total()
            await asyncio.to_thread(sim_stack.restart, container)
            assert tally.answered.total() > before, "no turn ended meanwhile"
            await tally.more(_TURNS)

    assert tally.failures == []
    assert tally.pulled > 0
    assert "LEDGER_UNAVAILABLE" not in tally.reasons


async def test_the_database_is_restarted_and_no_request_fails(sim_stack: Stack) -> None:
    async with load(sim_stack, "sim", "restarted-postgres") as tally:
        await tally.more(_TURNS)
        (database,) = sim_stack.containers("postgres")
        await asyncio.to_thread(sim_stack.restart, database)
        await tally.more(_TURNS)

    assert tally.failures == []


async def test_the_front_takes_a_new_configuration_and_no_request_fails(sim_stack: Stack) -> None:
    (front,) = sim_stack.containers("front")
    async with load(sim_stack, "sim", "reloaded-front") as tally:
        for _ in range(3):
            await tally.more(_TURNS)
            await asyncio.to_thread(docker, "kill", "--signal", "USR2", front)
        await tally.more(_TURNS)

    assert tally.failures == []
