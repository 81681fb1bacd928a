"""Checks of transports: what a pull gets, against computing, and what holds it back.

Measured on H200s: each descriptor of a transfer costs about 3.4 µs whatever its
size, and UCX's fallback to TCP brings about 0.3 GB/s (docs/benchmarks.md). Two
figures tell which of them it is.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvloop.doctor.facts import Facts, PairLink, pair_links
from kvloop.doctor.findings import Finding, advice, wrong
from kvloop.durations import to_seconds

DESCRIPTOR_SECONDS = 3.4e-6
"""What one piece of a transfer takes, whatever its size."""
_MOST_DESCRIPTORS = 512
"""Per block: two for each of 256 layers."""
_FEW_DESCRIPTORS = 8
FALLBACK_BYTES_PER_SECOND = 1.5e9
"""Below it a GPU's pull runs over TCP, whatever the network is."""
_GOOD_BYTES_PER_SECOND = 60e9
_LARGE_BLOCK = 128
_LONG_LATENCY_SECONDS = 0.05
_GPU = "cuda"


def check_links(facts: Facts) -> Iterator[Finding]:
    """Every pair's link is measured and worth using."""
    unmeasured = []
    for pair in pair_links(facts):
        if pair.link is None:
            unmeasured.append(pair.name)
            continue
        yield from _check_link(pair)
    if unmeasured:
        yield advice(
            "link_not_measured",
            "; ".join(unmeasured),
            "nothing has been pulled between them yet",
            "run `kvloop doctor --probe`, or let conversations take their second turns",
        )


def _check_link(pair: PairLink) -> Iterator[Finding]:
    link = pair.link
    assert link is not None
    speed, computed = link.tokens_per_second, pair.prefill_tokens_per_second
    rates = f"{speed:,.0f} tokens/s{_bytes(pair)}"
    slower = bool(computed) and speed < computed
    if link.held_back or slower:
        against = f" against {computed:,.0f} computed" if computed else ""
        yield wrong(
            "link_slower_than_recompute",
            pair.name,
            f"it pulls {rates}{against}: "
            + ("pulls are held back" if link.held_back else "most pulls do not pay"),
            _remedy(pair),
        )
    elif on_gpu(pair) and _held_up_by_descriptors(pair):
        yield advice("many_descriptors", pair.name, f"it pulls {rates}", _remedy(pair))
    if to_seconds(link.latency) > _LONG_LATENCY_SECONDS:
        yield advice(
            "link_latency",
            pair.name,
            f"a pull takes {to_seconds(link.latency) * 1e3:.0f} ms before its first byte",
            "short prefixes gain nothing: raise --kv-recompute-threshold; on a busy prefill "
            "engine it is the wait for its scheduler's step, which smaller "
            "--max-num-batched-tokens shorten",
        )


def _remedy(pair: PairLink) -> str:
    """What most likely holds the link back, and what to set."""
    if not on_gpu(pair):
        return (
            "on CPU engines memory and network decide; leave pulls held back, or compare UCX_TLS "
            "settings (tcp,self,sm,cma,posix,sysv) with `kvloop doctor --probe`"
        )
    if _held_up_by_descriptors(pair):
        return _fewer_descriptors(pair)
    rate = pair.link.bytes_per_second if pair.link is not None else 0.0
    if rate and rate < FALLBACK_BYTES_PER_SECOND:
        return transport_remedy(pair)
    return (
        "compare UCX_TLS settings with `kvloop doctor --probe`; until then pulls that do not pay "
        "are held back"
    )


def transport_remedy(pair: PairLink) -> str:
    """What to set where pulls run at the rate of TCP."""
    if _same_host(pair):
        return (
            "this is the rate of UCX's fallback to TCP: set UCX_CUDA_IPC_ENABLE_GET_ZCOPY=y "
            "and leave cuda_ipc and cuda_copy in UCX_TLS; with one GPU per engine, make both "
            "visible to both processes (CUDA_VISIBLE_DEVICES=0,1 and 1,0), own GPU first; "
            "`engine_setting_slows_pulls` in the sidecars' logs says which of them it is, and "
            "UCX_LOG_LEVEL=info in the engine's log which transports it took"
        )
    return (
        "this is the rate of TCP: give UCX the network's own transport (UCX_TLS=rc,cuda_copy "
        "with UCX_NET_DEVICES for InfiniBand or RoCE; the LIBFABRIC backend for EFA) and "
        "allow GPUDirect RDMA; UCX_LOG_LEVEL=info in the engine's log shows what it took"
    )


def _fewer_descriptors(pair: PairLink) -> str:
    block_size = pair.decode.worker.traits.block_size
    per_block = _descriptors_per_block(pair)
    gain = _LARGE_BLOCK / block_size if block_size else 1.0
    larger = (
        f"--kv-layout large-blocks (blocks of {_LARGE_BLOCK}) makes {gain:.0f} times fewer, "
        if gain > 1
        else ""
    )
    return (
        f"a block of {block_size} tokens takes as long as {per_block:.0f} descriptors (one for K "
        f"and one for V of each layer, 3.4 µs each, whatever their size): {larger}"
        f"--kv-layout cross-layers (vLLM 0.21 to 0.25) about {per_block:.0f} times fewer. "
        "The same for all workers of the model"
    )


def _held_up_by_descriptors(pair: PairLink) -> bool:
    """True if the time per block is what a plausible number of descriptors takes."""
    link = pair.link
    if link is None or link.bytes_per_second >= _GOOD_BYTES_PER_SECOND:
        return False
    return _FEW_DESCRIPTORS < _descriptors_per_block(pair) <= _MOST_DESCRIPTORS


def _descriptors_per_block(pair: PairLink) -> float:
    """Descriptors that would take the time that a block takes."""
    link = pair.link
    if link is None or not link.tokens_per_second:
        return 0.0
    seconds_per_block = pair.decode.worker.traits.block_size / link.tokens_per_second
    return seconds_per_block / DESCRIPTOR_SECONDS


def on_gpu(pair: PairLink) -> bool:
    """True if the pair's KV is in GPU memory."""
    return pair.decode.worker.traits.kv_buffer_device == _GPU


def _same_host(pair: PairLink) -> bool:
    hosts = {side.worker.traits.side_channel_host for side in (pair.prefill, pair.decode)}
    return len(hosts) == 1


def _bytes(pair: PairLink) -> str:
    rate = pair.gigabytes_per_second
    return f" ({rate:.2g} GB/s)" if rate else ""
