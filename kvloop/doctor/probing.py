"""Checks of what a probe showed."""

from __future__ import annotations

from collections.abc import Iterator

from kvloop.doctor.facts import Facts, ProbeRound
from kvloop.doctor.findings import Finding, advice, wrong

_TOLERANCE = 1.1

_WHY_NOT_RETAINED = {
    "NO_EVENT": (
        "the engine's connector did not report the turn to its sidecar",
        "give engine and sidecar the same KVLOOP_EVENTS_SOCKET (in containers: a shared volume) "
        "and load the connector (kv_connector=KvloopConnector)",
    ),
    "LEDGER_UNAVAILABLE": (
        "the ledger did not take the handle",
        "check that the decode sidecar reaches kvmeta, and kvmeta's log for tenants at their limit",
    ),
    "NOT_PINNED": (
        "the engine kept nothing",
        'set "bidirectional_kv_xfer": true on the decode engine',
    ),
}
_WHY_NOT_PULLED = {
    "INCOMPATIBLE": "the prefill worker cannot pull from the one that holds the KV; see the pairs",
    "UNPROVABLE": "the handle carries no digests: load KvloopConnector on both engines",
    "PREFIX_MISMATCH": "the chat template rewrites earlier turns, so the prompt is another one",
    "BELOW_THRESHOLD": "the probe is below --kv-recompute-threshold: raise --probe-tokens",
    "CACHED": "the prefill engine had the prompt already; probes use text of their own, so its "
    "cache may be shared",
    "PULL_FAILED": "the transfer failed; the prefill engine's log has NIXL's reason. If it is the "
    "handshake, let prefill's host reach decode's side channel (--side-channel-host and "
    "--side-channel-port, one port per tensor-parallel rank)",
    "ENGINE_EXPIRED": "the decode engine's deadline had passed: its clock or its lease is wrong",
    "EXPIRED": "the ledger's TTL is too short for two turns in a row",
    "PREFILL_FAILED": "the prefill leg failed with the handle; see the prefill engine's log",
    "LEDGER_UNAVAILABLE": "kvmeta did not answer the router in time",
    "SLOWER_THAN_RECOMPUTE": "pulls are held back on this link; see there",
}


def check_probe(facts: Facts) -> Iterator[Finding]:
    """A conversation reuses what its last turn left, and gains by it."""
    if facts.probe is None:
        return
    last = facts.probe.rounds[-1]
    if last.first.retain_outcome != "RETAINED":
        yield _not_retained(last)
        return
    pulled = [each for each in facts.probe.rounds if each.second.pulled_tokens]
    if not pulled:
        yield _not_pulled(last)
        return
    fastest = min(each.second.prefill_leg_seconds for each in pulled)
    recompute = facts.probe.recompute.prefill_leg_seconds
    if fastest > _TOLERANCE * recompute:
        yield wrong(
            "probe_slower",
            _pair(last),
            f"the prefill leg with a pull took {fastest * 1e3:.0f} ms at best, without "
            f"{recompute * 1e3:.0f} ms",
            "see the findings on links",
        )


def _not_retained(last: ProbeRound) -> Finding:
    outcome = last.first.retain_outcome
    what, fix = _WHY_NOT_RETAINED.get(outcome, (outcome.lower().replace("_", " "), "see the logs"))
    return wrong("probe_not_retained", last.first.decode_worker_id, what, fix)


def _not_pulled(last: ProbeRound) -> Finding:
    reason = last.second.miss_reason or "unknown"
    words = reason.lower().replace("_", " ")
    find = advice if reason == "SLOWER_THAN_RECOMPUTE" else wrong
    return find(
        "probe_not_pulled",
        _pair(last),
        f"the second turn pulled nothing ({words})",
        _WHY_NOT_PULLED.get(reason, "see the router's log for the turn"),
    )


def _pair(last: ProbeRound) -> str:
    return f"{last.second.prefill_worker_id} <- {last.first.decode_worker_id}"
