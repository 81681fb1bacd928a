"""Drives the wait for transfers that are under way, against one version of vLLM's sources.

Run in a process of its own, with that version first on PYTHONPATH; prints "ok". A
transfer's handles, the looks at them and the end of a step are the version's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

from services.worker import engine_arrivals
from tests.versions.ranks import Engine, Rank, worker_class
from tests.versions.stand_ins import (
    make_connector,
    make_scheduler_output,
    sidecar_socket,
    stand_in_for_gguf,
)

_LOOKS = 3
"""At so many looks a transfer is under way yet."""


def main() -> None:
    """A step waits for a transfer if nothing is computed, and fails for nothing."""
    stand_in_for_gguf()
    engine_arrivals.LONGEST_SECONDS = 10.0  # others may load this machine
    with sidecar_socket():
        engine = Engine(ranks=1)
        (rank,) = engine.ranks
        _has_nothing_to_do_with_blocks(rank)
        _the_version_keeps_handles_where_they_are_looked_for()
        _an_empty_step_tells_of_a_transfer_that_ends_in_it(engine, rank)
        _a_step_that_computes_does_not_wait(engine, rank)
        _an_empty_step_beside_one_that_computes_does_not_wait(engine, rank)
        _a_state_that_cannot_be_told_is_vllms_affair(engine, rank)
        _a_renamed_attribute_costs_the_wait_alone(engine, rank)
        engine.connector.shutdown()
    _stages_and_lockstep_count()
    sys.stdout.write("ok\n")


def _has_nothing_to_do_with_blocks(rank: Rank) -> None:
    """What has arrived lies there as it is to be."""
    worker, engine = rank.worker, MagicMock(remote_physical_blocks_per_logical=1)
    worker.use_host_buffer = worker.use_mla = worker._is_hma_required = False
    worker.enable_permute_local_kv = worker.enable_heterogeneous_attn_post_process = False
    worker._physical_blocks_per_logical_kv_block = 1
    worker._pending_recv_notifs = {}
    worker.transfer_topo = MagicMock(block_size_ratio=lambda _: 1, get_engine_info=lambda _: engine)
    for name in ("_sync_device_after_mamba_recv", "_sync_device_after_direct_recv"):
        setattr(worker, name, lambda *_: None)


class _Transfers:
    """NIXL's states of one handle.

    Args:
        rank: whose transfers these are.
        looks: after so many the transfer has ended.
    """

    def __init__(self, rank: Rank, looks: int) -> None:
        self.looked = 0
        self._looks = looks
        rank.worker._recving_transfers["request"] = [7]
        rank.worker._recving_metadata["request"] = MagicMock(region_blocks_to_zero=None)
        rank.worker.state_of = self.state

    def state(self, handle: int) -> str:
        """What NIXL says."""
        assert handle == 7
        self.looked += 1
        return "PROC" if self.looked <= self._looks else "DONE"


def _step(engine: Engine, rank: Rank, tokens: int = 0) -> set[str]:
    """One step; returns the requests that it tells to have arrived."""
    told: set[str] = set()
    execute: Callable[[Any], Any] = rank.execute

    def remember(metadata: Any) -> Any:
        output = execute(metadata)
        told.update(output.finished_recving or ())
        return output

    rank.execute = remember  # type: ignore[method-assign]
    try:
        engine.schedule(tokens)
        engine.execute()
    finally:
        del rank.execute
    return told


def _the_version_keeps_handles_where_they_are_looked_for() -> None:
    """Its own reads put them there, in lists by request."""
    reads = worker_class()._read_blocks.__code__
    assert "_recving_transfers" in reads.co_names, reads
    assert "append" in reads.co_names, reads


def _an_empty_step_tells_of_a_transfer_that_ends_in_it(engine: Engine, rank: Rank) -> None:
    transfers = _Transfers(rank, _LOOKS)
    assert _step(engine, rank) == {"request"}
    assert transfers.looked == _LOOKS + 2, "once more by the wait, and once by vLLM"
    assert not rank.worker._recving_transfers


def _a_step_that_computes_does_not_wait(engine: Engine, rank: Rank) -> None:
    transfers = _Transfers(rank, _LOOKS)
    for looks in range(1, _LOOKS + 1):
        assert not _step(engine, rank, tokens=1)
        assert transfers.looked == looks
    assert _step(engine, rank, tokens=1) == {"request"}


def _an_empty_step_beside_one_that_computes_does_not_wait(engine: Engine, rank: Rank) -> None:
    transfers = _Transfers(rank, _LOOKS)
    engine.schedule(tokens=1)
    engine.schedule()
    for looks in (1, 2):
        engine.execute()
        assert transfers.looked == looks
    assert _step(engine, rank) == {"request"}, "it waits once more"


def _a_state_that_cannot_be_told_is_vllms_affair(engine: Engine, rank: Rank) -> None:
    """NIXL's errors are expected: the next step waits again."""
    lost = type("nixlRemoteDisconnectError", (Exception,), {"__module__": "nixl_cu12._bindings"})
    transfers = _Transfers(rank, _LOOKS)

    def fail_once(handle: int) -> str:
        rank.worker.state_of = transfers.state
        raise lost

    rank.worker.state_of = fail_once
    assert not _step(engine, rank), "under way at the one look that vLLM takes"
    assert transfers.looked == 1
    assert _step(engine, rank) == {"request"}


def _a_renamed_attribute_costs_the_wait_alone(engine: Engine, rank: Rank) -> None:
    """As in a version that is yet to come."""
    transfers = _Transfers(rank, 0)
    found = rank.worker._recving_transfers
    rank.worker._recving_transfers = object()
    pop = rank.worker._pop_done_transfers
    rank.worker._pop_done_transfers = lambda _: pop(found)
    rank.connector._build_worker_half()
    try:
        assert _step(engine, rank) == {"request"}
    finally:
        rank.worker._recving_transfers = found
        del rank.worker._pop_done_transfers
    assert transfers.looked == 1


def _stages_and_lockstep_count() -> None:
    """More steps may be under way with pipeline stages; ranks of data may step together."""

    def quiet(**parallel: int) -> list[bool]:
        with sidecar_socket():
            connector = make_connector("kv_consumer", "engine-d", parallel=parallel)
            steps = [make_scheduler_output(tokens) for tokens in (1, 0, 0, 0)]
            told = [connector.build_connector_meta(step).kvloop_quiet for step in steps]
            connector.shutdown()
        return told

    assert quiet() == [False, False, True, True]
    assert quiet(pipeline_parallel_size=2) == [False, False, False, True]
    assert quiet(data_parallel_size=2) == [False] * 4


if __name__ == "__main__":
    main()
