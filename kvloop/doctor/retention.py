"""Checks of what is retained: how long, how much, for whom, and whether it is used."""

from __future__ import annotations

from collections.abc import Iterator

from kvloop.doctor.facts import DECODE, Facts, pair_links
from kvloop.doctor.findings import Finding, advice, wrong
from kvloop.durations import to_seconds

_FULL_SHARE = 0.6
_CONTINUED_TURN = 3
"""A conversation that got so far should have pulled at least once."""
_ENOUGH_CONVERSATIONS = 3
_CLOCK_TOLERANCE_SECONDS = 5.0


def check_leases(facts: Facts) -> Iterator[Finding]:
    """Decode engines keep blocks by lease, for the same time."""
    fixed: dict[float, list[str]] = {}
    ttls: dict[float, list[str]] = {}
    for each in facts.of_role(DECODE):
        traits = each.worker.traits
        ttl = to_seconds(traits.decoder_kv_blocks_ttl)
        ttls.setdefault(ttl, []).append(each.name)
        if not traits.lease_renewal:
            fixed.setdefault(ttl, []).append(f"{each.name} (vLLM {traits.vllm_version})")
    for ttl, names in fixed.items():
        yield advice(
            "fixed_ttl",
            ", ".join(names),
            f"their vLLM keeps every finished turn for {ttl:g} s: it cannot be renewed, and a "
            "crash of the sidecar or of kvmeta costs all of it",
            "vLLM 0.29 or newer keeps blocks by lease (60 s, renewed while they are wanted)",
        )
    if len(ttls) > 1:
        shown = "; ".join(f"{ttl:g} s: {', '.join(names)}" for ttl, names in sorted(ttls.items()))
        yield advice(
            "ttls_differ",
            "decode workers",
            f"decoder_kv_blocks_ttl differs ({shown}), so how long a conversation may pause "
            "depends on where it runs",
            "set the same --decoder-kv-blocks-ttl-seconds on all of them",
        )


def check_retained(facts: Facts) -> Iterator[Finding]:
    """Nothing is retained without an owner, and not too much."""
    for each in facts.of_role(DECODE):
        info, total = each.info, each.worker.traits.num_kv_blocks
        if info is None:
            continue
        if info.orphan_pins:
            yield wrong(
                "orphans",
                each.name,
                f"{info.orphan_pins} of its {info.retained_pins} retained turns belong to no "
                "conversation in the ledger",
                "they fall at their lease; if the count does not return to 0, kvmeta has lost "
                "its database or two kvmetas are in use: compare the --kvmeta of all services",
            )
        if total and info.retained_blocks > _FULL_SHARE * total:
            yield advice(
                "much_retained",
                each.name,
                f"{info.retained_blocks / total:.0%} of its KV blocks are retained",
                "lower its budget, or the TTL of conversations, if requests wait for KV blocks",
            )


def check_reuse(facts: Facts) -> Iterator[Finding]:
    """Conversations that go on do pull."""
    going_on = [each for each in facts.conversations if each.turn >= _CONTINUED_TURN]
    links = pair_links(facts)
    if len(going_on) < _ENOUGH_CONVERSATIONS or not links:
        return
    if all(pair.link is None for pair in links):
        yield wrong(
            "nothing_pulled",
            "all prefill workers",
            f"{len(going_on)} conversations have got to turn {_CONTINUED_TURN} or further, and "
            "nothing has ever been pulled",
            "the receipts and kvloop_router_misses_total say why: FIRST_TURN (clients send no "
            "stable conversation id), PREFIX_MISMATCH (the history is changed between turns, for "
            "example reasoning stripped), CACHED (one prefill worker whose prefix cache holds "
            "everything; nothing to gain), EXPIRED (pauses are longer than the TTL)",
        )


def check_clock(facts: Facts) -> Iterator[Finding]:
    """The ledger's clock is the time that people read."""
    offset = facts.clock_offset_seconds
    if offset is not None and abs(offset) > _CLOCK_TOLERANCE_SECONDS:
        yield advice(
            "clock",
            f"kvmeta {facts.kvmeta.address}",
            f"its clock is {abs(offset):.0f} s {'ahead of' if offset > 0 else 'behind'} this "
            "machine's; deadlines travel as durations and stay right, but times in listings and "
            "logs do not match, and replicas of kvmeta on one database have to agree",
            "synchronise clocks (chrony, NTP)",
        )
