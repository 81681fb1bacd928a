"""What the doctor says, as text and as JSON. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kvloop.doctor.facts import Facts, PairLink, Probe, pair_links
from kvloop.doctor.findings import Finding, Severity
from kvloop.doctor.pulls import told
from kvloop.durations import to_seconds
from kvloop.receipts import Receipt

_MARKS = {Severity.WRONG: "WRONG ", Severity.ADVICE: "advice"}


def as_text(facts: Facts, findings: Sequence[Finding]) -> str:
    """The whole report for people."""
    parts = [_seen(facts)]
    links = pair_links(facts)
    if any(pair.link is not None for pair in links):
        parts.append("\n".join(["links:", *(f"  {_link(pair)}" for pair in links if pair.link)]))
    if facts.probe is not None:
        parts.append("\n".join(["probe:", *(f"  {line}" for line in _probe(facts.probe))]))
    parts.extend(_finding(each) for each in findings)
    wrong = sum(each.severity is Severity.WRONG for each in findings)
    parts.append(f"{wrong} wrong, {len(findings) - wrong} to consider" if findings else "all well")
    return "\n\n".join(parts) + "\n"


def as_json(facts: Facts, findings: Sequence[Finding]) -> str:
    """The whole report for programs: one JSON object."""
    report: dict[str, Any] = {
        "healthy": all(each.severity is not Severity.WRONG for each in findings),
        "findings": [asdict(each) for each in findings],
        "workers": [each.name for each in facts.workers],
        "models": list(facts.models),
        "links": [_link_facts(pair) for pair in pair_links(facts)],
    }
    if facts.probe is not None:
        report["probe"] = {
            "rounds": [asdict(each) for each in facts.probe.rounds],
            "recompute": asdict(facts.probe.recompute),
            "pulls": asdict(facts.probe.pulls) if facts.probe.pulls is not None else None,
        }
    return json.dumps(report) + "\n"


def _seen(facts: Facts) -> str:
    workers = len(facts.workers)
    return (
        f"router {facts.router.address}, kvmeta {facts.kvmeta.address}: "
        f"{workers} worker{'' if workers == 1 else 's'}, "
        f"models {', '.join(facts.models) or 'none'}"
    )


def _link(pair: PairLink) -> str:
    link = pair.link
    assert link is not None
    rate = pair.gigabytes_per_second
    computed = pair.prefill_tokens_per_second
    return (
        f"{pair.name}: pulls {link.tokens_per_second:,.0f} tokens/s"
        + (f" ({rate:.3g} GB/s)" if rate else "")
        + f", {to_seconds(link.latency) * 1e3:.1f} ms before the first byte"
        + (f"; computes {computed:,.0f} tokens/s" if computed else "")
        + (" (pulls held back)" if link.held_back else "")
    )


def _link_facts(pair: PairLink) -> dict[str, Any]:
    link = pair.link
    return {
        "prefill": pair.prefill.name,
        "decode": pair.decode.name,
        "measured": link is not None,
        "samples": link.samples if link is not None else 0,
        "tokens_per_second": link.tokens_per_second if link is not None else None,
        "bytes_per_second": link.bytes_per_second if link is not None else None,
        "latency_seconds": to_seconds(link.latency) if link is not None else None,
        "held_back": link.held_back if link is not None else None,
        "prefill_tokens_per_second": pair.prefill_tokens_per_second or None,
    }


def _probe(found: Probe) -> list[str]:
    return [
        *(f"{number}. {_second(each.second)}" for number, each in enumerate(found.rounds, 1)),
        f"without reuse: {found.recompute.prompt_tokens:,} tokens computed in "
        f"{found.recompute.prefill_leg_seconds * 1e3:.0f} ms",
        *([told(found.pulls)] if found.pulls is not None and found.pulls.count else []),
    ]


def _second(receipt: Receipt) -> str:
    took = ""
    if receipt.pull_seconds is not None and receipt.pull_seconds > 0:
        took = f" in {receipt.pull_seconds * 1e3:.1f} ms"
    why = f" ({receipt.miss_reason.lower().replace('_', ' ')})" if receipt.miss_reason else ""
    return (
        f"pulled {receipt.pulled_tokens:,} of {receipt.prompt_tokens:,} tokens{took}{why}, "
        f"{receipt.cached_tokens:,} cached, {receipt.recomputed_tokens:,} computed; "
        f"prefill leg {receipt.prefill_leg_seconds * 1e3:.0f} ms"
    )


def _finding(finding: Finding) -> str:
    lines = [f"{_MARKS[finding.severity]}  {finding.subject}: {finding.what}"]
    if finding.fix:
        lines.append(f"        -> {finding.fix}")
    return "\n".join(lines)
