"""Every service is restarted under load, and no request fails."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from tests.compose.commands import docker
from tests.compose.knocks import knocks
from tests.compose.load import load
from tests.compose.stack import Stack

pytestmark = pytest.mark.timeout(1200)
_TURNS = 2
"""Of each kind of client, before and after."""
_RELOADS = 5
_KVMETA_METRICS_PORT = 9200


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


async def test_routers_are_added_and_taken_away_and_no_request_fails(sim_stack: Stack) -> None:
    async with load(sim_stack, "sim", "scaled-router") as tally:
        with ExitStack() as scaled:
            await tally.more(_TURNS)
            more = sim_stack.scaled("router", 4)
            # Not while they leave: what is asked is /health/ready, and says so then.
            async with knocks(sim_stack) as knocked:
                added = await asyncio.to_thread(scaled.enter_context, more)
                await asyncio.to_thread(sim_stack.until_ready, *added)
                await tally.more(_TURNS)
            await asyncio.to_thread(scaled.close)
        await tally.more(_TURNS)

    assert len(added) == 2
    assert tally.failures == []
    assert knocked.failures == []


async def test_a_kvmeta_that_is_added_gets_its_share_and_is_taken_away_again(
    sim_stack: Stack,
) -> None:
    takes = (_KVMETA_METRICS_PORT, "kvloop_kvmeta_takes_total")
    async with load(sim_stack, "sim", "scaled-kvmeta") as tally:
        with ExitStack() as scaled:
            await tally.more(_TURNS)
            (added,) = await asyncio.to_thread(scaled.enter_context, sim_stack.scaled("kvmeta", 3))
            await asyncio.to_thread(sim_stack.until_ready, added)
            while not await asyncio.to_thread(sim_stack.counted, added, *takes):
                await tally.more(1)
            await asyncio.to_thread(scaled.close)
        await tally.more(_TURNS)

    assert tally.failures == []
    assert "LEDGER_UNAVAILABLE" not in tally.reasons


async def test_the_front_takes_a_new_configuration_and_no_request_fails(sim_stack: Stack) -> None:
    (front,) = sim_stack.containers("front")
    # HAProxy's old process tells connections that it has just accepted to go elsewhere.
    knocking = knocks(sim_stack, repeats=True)
    async with load(sim_stack, "sim", "reloaded-front") as tally, knocking as knocked:
        for _ in range(_RELOADS):
            await tally.more(_TURNS)
            await asyncio.to_thread(docker, "kill", "--signal", "USR2", front)
        await tally.more(_TURNS)

    assert tally.failures == []
    assert knocked.failures == []
    assert min(knocked.answered[port] for port in ("http", "grpc")) > 0


def test_the_front_finds_nothing_to_warn_of_in_its_configuration(sim_stack: Stack) -> None:
    (front,) = sim_stack.containers("front")

    found = docker("exec", front, "haproxy", "-c", "-f", "/usr/local/etc/haproxy/haproxy.cfg")

    assert "arning" not in found
