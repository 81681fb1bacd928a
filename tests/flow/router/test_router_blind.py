"""Routing that knows less than it should: no events from engines, ranks that are gone."""

from __future__ import annotations

from kvloop.worker.v1 import worker_pb2
from tests.flow.router.stack import running


async def test_E6_without_events_from_the_engines_routing_says_that_it_is_degraded() -> None:
    async with running(decode=["d0", "d1"]) as stack:
        assert stack.count("reuse_degraded") == 0
        for worker_id in ("d0", "d1"):
            stack[worker_id].commit_outcome = worker_pb2.COMMIT_OUTCOME_NO_EVENT
        for number in range(8):
            answer = await stack.chat(f"c{number % 2}")
            assert answer.chunks
        assert stack.count("reuse_degraded") == 1
        assert stack.count("matched_tokens_total") == 0


async def test_E6_matched_tokens_are_counted_beside_proven_ones() -> None:
    async with running() as stack:
        for _ in range(10):
            await stack.chat("c")
        assert stack.count("reuse_degraded") == 0
        assert stack.count("matched_tokens_total") == 9 * 100
        assert stack.count("proven_tokens_total") == 9 * 90


async def test_A14_a_rank_is_a_worker_and_its_handle_leads_back_to_it() -> None:
    """Data-parallel ranks have a sidecar each: the row names the rank by worker and engine."""
    ranks = ["d-rank0", "d-rank1"]
    traits = {rank: {"data_parallel_size": 2} for rank in ranks}
    async with running(decode=ranks, traits=traits) as stack:
        stack.give_handle("c", "d-rank1")
        answer = await stack.chat("c")
        assert answer.receipt.decode_worker_id == "d-rank1"
        (pulled,) = stack["p0"].prefills
        assert pulled.engine == stack["d-rank1"].worker.engine
        assert stack["d-rank0"].calls == 0


async def test_A14_a_rank_that_does_not_exist_is_picked_anew() -> None:
    ranks = ["d-rank0", "d-rank1"]
    async with running(decode=ranks, traits={r: {"data_parallel_size": 2} for r in ranks}) as stack:
        handle_id = stack.give_handle("c", "d-rank1")
        stack.ledger.row("c").handle.worker_id = "d-rank7"  # type: ignore[union-attr]
        stack.ledger.row("c").last_worker_id = "d-rank7"
        answer = await stack.chat("c")
        assert answer.miss == "INCOMPATIBLE"
        assert answer.receipt.decode_worker_id in ranks
        assert stack["p0"].params_seen == []
        assert stack.ledger.returned == [handle_id]
        assert stack.count("turns_total", outcome="answered") == 1
        assert stack.count("errors_total") == 0
