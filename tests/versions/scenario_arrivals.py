"""Drives the wait for transfers that are under way, against one version of vLLM's sources.

Run in a process of its own, with that version first on PYTHONPATH; prints "ok". A
transfer's handles, the looks at them and the end of a step are the version's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from tests.versions.ranks import Engine, Rank
from tests.versions.stand_ins import sidecar_socket, stand_in_for_gguf

_LOOKS = 3
"""At so many looks a transfer is under way yet."""


def main() -> None:
    """A step waits for a transfer if it computes nothing, and fails for nothing."""
    stand_in_for_gguf()
    with sidecar_socket():
        engine = Engine(ranks=1)
        (rank,) = engine.ranks
        _the_version_keeps_handles_where_they_are_looked_for()
        _an_empty_step_tells_of_a_transfer_that_ends_in_it(engine, rank)
        _a_step_that_computes_does_not_wait(engine, rank)
        _a_state_that_cannot_be_told_is_vllms_affair(engine, rank)
        _a_renamed_attribute_costs_the_wait_alone(engine, rank)
        engine.connector.shutdown()
    sys.stdout.write("ok\n")


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
        rank.worker.nixl_wrapper.check_xfer_state = self.state

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
        del rank.execute  # type: ignore[method-assign]
    return told


def _the_version_keeps_handles_where_they_are_looked_for() -> None:
    """Its own reads put them there, in lists by request."""
    from tests.versions.ranks import worker_class

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


def _a_state_that_cannot_be_told_is_vllms_affair(engine: Engine, rank: Rank) -> None:
    transfers = _Transfers(rank, 1)

    def fail_once(handle: int) -> str:
        rank.worker.nixl_wrapper.check_xfer_state = transfers.state
        raise RuntimeError("NIXL_ERR_BACKEND")

    rank.worker.nixl_wrapper.check_xfer_state = fail_once
    assert not _step(engine, rank), "under way at the one look that vLLM takes"
    assert transfers.looked == 1
    assert _step(engine, rank) == {"request"}


def _a_renamed_attribute_costs_the_wait_alone(engine: Engine, rank: Rank) -> None:
    """As in a version that is yet to come."""
    transfers = _Transfers(rank, 0)
    found = rank.worker._recving_transfers
    rank.worker._recving_transfers = None
    pop = rank.worker._pop_done_transfers
    rank.worker._pop_done_transfers = lambda _: pop(found)
    try:
        assert _step(engine, rank) == {"request"}
    finally:
        rank.worker._recving_transfers = found
        del rank.worker._pop_done_transfers
    assert transfers.looked == 1


if __name__ == "__main__":
    main()
