"""Two turns from outside reuse KV, over gRPC and HTTP, and Prometheus sees it."""

from __future__ import annotations

import pytest
import yaml

from tests.compose import prometheus
from tests.compose.commands import docker
from tests.compose.engines import pulled_tokens
from tests.compose.stack import ROOT, Stack
from tests.compose.talk import Conversation, Talker
from tests.compose.waiting import until_async

pytestmark = pytest.mark.timeout(900)


def test_every_container_is_healthy(sim_stack: Stack) -> None:
    health = sim_stack.health()

    assert set(health.values()) == {"healthy"}
    for service, count in (("router", 2), ("kvmeta", 2), ("decode", 2), ("prometheus", 1)):
        assert len(sim_stack.containers(service)) == count


@pytest.mark.parametrize("service", ["router", "kvmeta"])
def test_images_without_an_engine_are_small_and_run_as_nobody_special(
    sim_stack: Stack, service: str
) -> None:
    (container, *_) = sim_stack.containers(service)
    image = docker("inspect", "--format", "{{.Image}}", container)
    size, user = docker("inspect", "--format", "{{.Size}} {{.Config.User}}", image).split()

    assert int(size) < 250_000_000
    assert user == "kvloop"


async def test_the_second_turn_over_grpc_pulls_what_the_engine_says_it_pulled(
    sim_stack: Stack, sim: Talker
) -> None:
    conversation = Conversation("grpc")
    first = await sim.over_grpc(conversation)
    before = pulled_tokens(sim_stack)
    second = await sim.over_grpc(conversation)

    assert first.miss_reason == "FIRST_TURN"
    assert second.miss_reason is None
    assert second.pulled_tokens > 64
    assert pulled_tokens(sim_stack) - before == second.pulled_tokens


async def test_the_second_turn_over_http_pulls_too_without_any_id(
    sim_stack: Stack, sim: Talker
) -> None:
    conversation = Conversation("http")
    await sim.over_http(conversation)
    before = pulled_tokens(sim_stack)
    second = await sim.over_http(conversation)

    assert second.miss_reason is None
    assert second.pulled_tokens > 64
    assert pulled_tokens(sim_stack) - before == second.pulled_tokens


async def test_a_conversation_goes_on_whichever_router_serves_it(
    sim_stack: Stack, sim: Talker
) -> None:
    conversation = Conversation("both")
    await sim.over_grpc(conversation)
    for _ in range(4):
        assert (await sim.over_grpc(conversation)).miss_reason is None

    async def both_have_served() -> bool:
        served = await prometheus.query(sim_stack, "sum by (instance) (kvloop_router_turns_total)")
        return len([count for _, count in served if count > 0]) == 2

    assert await until_async(both_have_served, 120)


async def test_prometheus_scrapes_every_replica_and_has_the_alert_rules(sim_stack: Stack) -> None:
    expected = {"router": 2, "kvmeta": 2, "worker": 3}

    async def all_up() -> bool:
        return await prometheus.targets_up(sim_stack) == expected

    assert await until_async(all_up, 180), await prometheus.targets_up(sim_stack)

    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())
    shipped = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}

    async def all_evaluated() -> bool:
        loaded = await prometheus.get(sim_stack, "rules", type="alert")
        rules = [rule for group in loaded["groups"] for rule in group["rules"]]
        assert {rule["name"] for rule in rules} == shipped
        return {rule["health"] for rule in rules} == {"ok"}

    assert await until_async(all_evaluated, 180)
    firing = await prometheus.query(sim_stack, 'ALERTS{alertstate="firing"}')
    assert firing == []


async def test_prometheus_has_what_the_services_counted(sim_stack: Stack, sim: Talker) -> None:
    conversation = Conversation("counted")
    await sim.over_grpc(conversation)
    pulled = (await sim.over_grpc(conversation)).pulled_tokens

    async def scraped() -> bool:
        query = 'sum(kvloop_router_prompt_tokens_total{source="pulled"})'
        return [count for _, count in await prometheus.query(sim_stack, query)] >= [pulled]

    assert await until_async(scraped, 120)
    for metric in (
        'kvloop_rpc_seconds_count{job="kvmeta",method="TakeHandle",code="OK"}',
        'kvloop_rpc_seconds_count{job="worker",method="Prefill",code="OK"}',
        "kvloop_worker_retained_pins",
        "kvloop_kvmeta_takes_total",
        "process_resident_memory_bytes",
    ):
        assert await prometheus.query(sim_stack, metric), metric
