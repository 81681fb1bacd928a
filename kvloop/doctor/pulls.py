"""Checks of a probe's pulls by the prefill engine's own counts.

Receipts tell how long a pull took; the engine tells in how many pieces it went and how
long they took to post. Pieces and rate together name what holds it back.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvloop.bench.transfers import Transfers
from kvloop.doctor.facts import Facts, PairLink, pair_links
from kvloop.doctor.findings import Finding, advice, wrong
from kvloop.doctor.links import (
    DESCRIPTOR_SECONDS,
    FALLBACK_BYTES_PER_SECOND,
    on_gpu,
    transport_remedy,
)

_LARGEST_SHARE = 0.5
"""Of a pull's time, that its pieces may take."""


def check_pulls(facts: Facts) -> Iterator[Finding]:
    """The probe's pulls go in few pieces and over a fast transport."""
    pulls = facts.probe.pulls if facts.probe is not None else None
    pair = _probed(facts)
    if pulls is None or pair is None or not pulls.count or not on_gpu(pair):
        return
    rate = pulls.bytes_per_second or 0.0
    pieces_seconds = pulls.descriptors * DESCRIPTOR_SECONDS
    if pieces_seconds > _LARGEST_SHARE * pulls.transfer_seconds:
        yield advice(
            "pull_pieces",
            pair.name,
            f"{told(pulls)}: at 3.4 µs a piece that alone takes "
            f"{pieces_seconds / pulls.count * 1e3:.1f} ms",
            "start all workers of the model with --kv-layout auto, which chooses cross-layer "
            "blocks (vLLM 0.21 to 0.25), blocks of 128, or of 64 for latent attention",
        )
    elif rate < FALLBACK_BYTES_PER_SECOND:
        yield wrong("pull_transport", pair.name, told(pulls), transport_remedy(pair))


def told(pulls: Transfers) -> str:
    """A probe's pulls in words; at least one."""
    each = pulls.bytes / pulls.count
    pieces = pulls.descriptors / pulls.count
    size = f" of {each / pieces / 1024:,.0f} KiB" if pieces else ""
    rate = (pulls.bytes_per_second or 0.0) / 1e9
    return (
        f"each pull moved {each / 1e6:,.1f} MB in {pieces:,.0f} pieces{size} in "
        f"{pulls.transfer_seconds / pulls.count * 1e3:.1f} ms ({rate:.3g} GB/s), "
        f"{pulls.post_seconds / pulls.count * 1e3:.1f} ms of it to post them"
    )


def _probed(facts: Facts) -> PairLink | None:
    """The pair that the probe's last pull ran between."""
    if facts.probe is None:
        return None
    last = facts.probe.rounds[-1]
    for pair in pair_links(facts):
        names = (pair.prefill.worker.worker_id, pair.decode.worker.worker_id)
        if names == (last.second.prefill_worker_id, last.first.decode_worker_id):
            return pair
    return None
