"""What users see when a part is killed: an answer, at worst without reuse."""

from __future__ import annotations

import pytest

from tests.compose import prometheus
from tests.compose.commands import docker
from tests.compose.stack import Stack
from tests.compose.talk import Conversation, Talker
from tests.compose.waiting import until_async

pytestmark = pytest.mark.timeout(900)
_RECOVERY_SECONDS = 180.0


async def _reuses(sim: Talker, conversation: Conversation) -> bool:
    """Whether a turn pulls; each makes the next one possible."""
    return (await sim.over_grpc(conversation)).miss_reason is None


async def test_a_router_is_killed_and_the_other_serves_all_that_comes_after(
    sim_stack: Stack, sim: Talker
) -> None:
    conversation = Conversation("router-killed")
    await sim.over_grpc(conversation)
    with sim_stack.killed(sim_stack.containers("router")[0]):
        said = [await sim.over_grpc(conversation) for _ in range(3)]
        for each in range(3):
            await sim.over_http(Conversation(f"router-killed-{each}"))

    # Its handle may have been with the router that died; the next turns have theirs.
    assert said[-1].miss_reason is None


async def test_a_kvmeta_is_killed_and_reuse_goes_on_with_the_other(
    sim_stack: Stack, sim: Talker
) -> None:
    conversation = Conversation("kvmeta-killed")
    await sim.over_grpc(conversation)
    with sim_stack.killed(sim_stack.containers("kvmeta")[0]):
        reasons = [(await sim.over_grpc(conversation)).miss_reason for _ in range(3)]

    assert reasons == [None, None, None]


async def test_without_any_kvmeta_turns_recompute_and_recover(
    sim_stack: Stack, sim: Talker
) -> None:
    conversation = Conversation("kvmeta-gone")
    await sim.over_grpc(conversation)
    with sim_stack.killed(*sim_stack.containers("kvmeta")):
        during = [await sim.over_grpc(conversation) for _ in range(2)]
        over_http = await sim.over_http(Conversation("kvmeta-gone-http"))

    assert {said.miss_reason for said in during} == {"LEDGER_UNAVAILABLE"}
    assert over_http.text
    assert await until_async(lambda: _reuses(sim, conversation), _RECOVERY_SECONDS)


async def test_without_postgresql_turns_recompute_an_alert_says_so_and_the_ledger_is_kept(
    sim_stack: Stack, sim: Talker
) -> None:
    conversation, silent = Conversation("postgres-gone"), Conversation("postgres-silent")
    await sim.over_grpc(conversation)
    await sim.over_grpc(silent)

    async def alert_is_pending() -> bool:
        said = await sim.over_grpc(conversation)
        assert said.miss_reason == "LEDGER_UNAVAILABLE"
        query = 'ALERTS{alertname="KvloopLedgerUnavailable"}'
        return bool(await prometheus.query(sim_stack, query))

    with sim_stack.killed(*sim_stack.containers("postgres")):
        assert await until_async(alert_is_pending, 180, pause_seconds=3)

    assert await until_async(lambda: _reuses(sim, conversation), _RECOVERY_SECONDS)
    assert (await sim.over_grpc(silent)).miss_reason is None


async def test_a_decode_worker_is_killed_its_turns_go_elsewhere_and_its_handles_are_void(
    sim_stack: Stack, sim: Talker
) -> None:
    """The second conversation speaks once the lease of the dead worker has run out."""
    first, second, holder = await _two_of_one_holder(sim)
    container = next(
        each
        for each in sim_stack.containers("decode")
        if holder.endswith(docker("inspect", "--format", "{{.Config.Hostname}}", each))
    )
    with sim_stack.killed(container):
        moved = await sim.over_grpc(first)
        assert moved.decode_worker_id != holder
        assert moved.miss_reason is not None
        assert await until_async(lambda: _reuses(sim, first), _RECOVERY_SECONDS)

        async def lease_has_ended() -> bool:
            query = "sum(kvloop_kvmeta_leases_ended_total)"
            return [count for _, count in await prometheus.query(sim_stack, query)] > [0]

        assert await until_async(lease_has_ended, _RECOVERY_SECONDS)
        assert (await sim.over_grpc(second)).miss_reason == "VOID"


async def _two_of_one_holder(sim: Talker) -> tuple[Conversation, Conversation, str]:
    """Two conversations whose KV is on one decode worker, and its id."""
    held: dict[str, Conversation] = {}
    for number in range(3):  # of three, two share one of two workers
        conversation = Conversation(f"decode-killed-{number}")
        said = await sim.over_grpc(conversation)
        if said.decode_worker_id in held:
            return held[said.decode_worker_id], conversation, said.decode_worker_id
        held[said.decode_worker_id] = conversation
    raise AssertionError("there are more than two decode workers")
