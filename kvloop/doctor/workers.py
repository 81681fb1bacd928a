"""Checks of services and workers: reachable, registered, of versions that fit."""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Callable, Iterator

from kvloop.compatibility import Obstacle, hand_over_obstacle, pull_obstacle
from kvloop.doctor.facts import DECODE, PREFILL, Facts, WorkerFacts
from kvloop.doctor.findings import Finding, advice, wrong
from kvloop.kvmeta.v1 import registry_pb2

CONNECTOR = "KvloopConnector"

_FIXES = {
    Obstacle.MODEL: "start them with the same --served-model-name",
    Obstacle.BLOCK_SIZE: "start all workers of the model with the same --block-size",
    Obstacle.KV_CACHE_DTYPE: "start all engines of the model with the same --kv-cache-dtype",
    Obstacle.KV_BUFFER_DEVICE: "run both engines on the same kind of device",
    Obstacle.CONTRACT_VERSION: "run the same version of kvloop beside both engines",
    Obstacle.TENSOR_PARALLEL_SIZE: (
        "give both engines the same --tensor-parallel-size; pulls need it, hand-overs do not"
    ),
    Obstacle.PIPELINE_PARALLEL_SIZE: "give both engines the same --pipeline-parallel-size",
    Obstacle.PREFILL_NOT_BIDIRECTIONAL: (
        'set "bidirectional_kv_xfer": true in the prefill engine\'s kv_connector_extra_config'
    ),
    Obstacle.DECODE_NOT_BIDIRECTIONAL: (
        'set "bidirectional_kv_xfer": true in the decode engine\'s kv_connector_extra_config'
    ),
}


def check_services(facts: Facts) -> Iterator[Finding]:
    """Router and kvmeta answer, and know the same workers."""
    for name, service, loss in (
        ("router", facts.router, "no client can be served"),
        ("kvmeta", facts.kvmeta, "nothing is reused, and routers learn of no workers"),
    ):
        if service.trouble:
            yield wrong(
                "service_unreachable",
                f"{name} {service.address}",
                f"it does not answer ({service.trouble}): {loss}",
                f"start it, or name its address with --{name}",
            )
    if facts.router.trouble or facts.kvmeta.trouble:
        return
    served = {each.worker.model for each in facts.workers if each.listed}
    for model in sorted(served - set(facts.models)):
        if _has_both_roles(facts, model):
            yield wrong(
                "router_sees_no_workers",
                f"router {facts.router.address}",
                f"it does not serve {model}, although kvmeta lists workers of it",
                f"point the router's --kvmeta at {facts.kvmeta.address}",
            )


def check_workers(facts: Facts) -> Iterator[Finding]:
    """Every worker answers, holds a lease, and has a partner."""
    for each in facts.workers:
        yield from _check_worker(each)
    for model in sorted({each.worker.model for each in facts.workers if each.listed}):
        for role, name in ((PREFILL, "prefill"), (DECODE, "decode")):
            if not any(each.worker.model == model for each in facts.of_role(role)):
                yield wrong(
                    "role_missing",
                    model,
                    f"it has no live {name} worker",
                    f"start one: python -m services.worker --role {name} --model ...",
                )
    if not facts.kvmeta.trouble and not any(each.listed for each in facts.workers):
        yield wrong(
            "no_workers",
            f"kvmeta {facts.kvmeta.address}",
            "no worker is registered",
            "start workers with --kvmeta pointing here; their logs say why they do not register",
        )


def _check_worker(each: WorkerFacts) -> Iterator[Finding]:
    if each.info is None:
        yield wrong(
            "worker_unreachable",
            each.name,
            f"its sidecar at {each.worker.address} does not answer ({each.trouble})",
            "routers need to reach that address: set --advertise to one that they can, and "
            "check firewalls; if the sidecar is dead, its lease ends by itself",
        )
        return
    if not each.listed or not each.info.registered:
        yield wrong(
            "worker_unregistered",
            each.name,
            "it holds no lease in the registry, so no turn goes there",
            "point its --kvmeta here; its log says why registration is refused",
        )
    if each.listed and each.info.worker.engine != each.worker.engine:
        yield advice(
            "worker_restarted",
            each.name,
            "its engine has been restarted since it registered; what it retained is gone",
        )
    if each.info.worker.state == registry_pb2.Worker.STATE_DRAINING:
        yield advice("worker_draining", each.name, "it finishes what it has and takes no new turns")


def check_versions(facts: Facts) -> Iterator[Finding]:
    """Engines run kvloop's connector, of one version, on one vLLM and NIXL."""
    for each in facts.workers:
        if each.listed and each.worker.traits.kv_connector != CONNECTOR:
            yield wrong(
                "connector_missing",
                each.name,
                f"its engine runs {each.worker.traits.kv_connector or 'no connector'}: nothing is "
                "proven, and a pull could read wrong tokens",
                f'set "kv_connector": "{CONNECTOR}" and "kv_connector_module_path": '
                '"services.worker.connector" in --kv-transfer-config',
            )
    yield from _mixed(
        facts, "vllm_versions_differ", "vLLM versions", lambda traits: traits.vllm_version
    )
    yield from _mixed(
        facts, "nixl_versions_differ", "NIXL versions", lambda traits: traits.nixl_version
    )


def _mixed(
    facts: Facts, check: str, words: str, value: Callable[[registry_pb2.EngineTraits], str]
) -> Iterator[Finding]:
    for model in sorted({each.worker.model for each in facts.workers if each.listed}):
        found: dict[str, list[str]] = defaultdict(list)
        for each in facts.workers:
            if each.listed and each.worker.model == model:
                found[value(each.worker.traits)].append(each.name)
        if len(found) > 1:
            shown = "; ".join(f"{v}: {', '.join(names)}" for v, names in sorted(found.items()))
            yield advice(
                check,
                model,
                f"{words} differ ({shown}); engines refuse each other's handshake if their "
                "layouts of the KV cache do",
                "run one version on all engines of a model",
            )


def check_pairs(facts: Facts) -> Iterator[Finding]:
    """Every pair can hand over and pull."""
    blocked: dict[tuple[str, Obstacle], list[str]] = defaultdict(list)
    for prefill, decode in facts.pairs():
        pair = f"{prefill.name} and {decode.name}"
        if obstacle := hand_over_obstacle(prefill.worker, decode.worker):
            blocked["cannot_hand_over", obstacle].append(pair)
        elif obstacle := pull_obstacle(prefill.worker, decode.worker):
            blocked["cannot_pull", obstacle].append(pair)
    for (check, obstacle), pairs in blocked.items():
        loss = (
            "decode computes every prompt itself"
            if check == "cannot_hand_over"
            else "nothing is reused between them"
        )
        yield wrong(check, "; ".join(pairs), f"{obstacle.value}: {loss}", _FIXES[obstacle])


def check_side_channels(facts: Facts) -> Iterator[Finding]:
    """Other hosts can reach each engine's side channel."""
    hosts = {_host(each.worker.address) for each in facts.workers if each.listed}
    for each in facts.workers:
        if not each.listed:
            continue
        channel, host = each.worker.traits.side_channel_host, _host(each.worker.address)
        if _is_loopback(channel) and (not _is_loopback(host) or len(hosts) > 1):
            yield wrong(
                "loopback_side_channel",
                each.name,
                f"its NIXL side channel listens on {channel}, while the worker is advertised at "
                f"{each.worker.address}: engines on other hosts cannot shake hands with it",
                "set --side-channel-host to an address that the other workers can reach",
            )


def _has_both_roles(facts: Facts, model: str) -> bool:
    return all(
        any(each.worker.model == model for each in facts.of_role(role))
        for role in (PREFILL, DECODE)
    )


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
