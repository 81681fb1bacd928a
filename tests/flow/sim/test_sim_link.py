"""A link that changes while engines run, seen through sidecars."""

from __future__ import annotations

from pathlib import Path

from kvloop.common.v1 import common_pb2
from kvloop.durations import to_seconds
from kvloop.worker.v1 import worker_pb2
from tests.flow.sim.engines import engine, prompt
from tests.flow.sim.pairs import open_pair


async def test_the_link_of_an_engine_can_be_changed_and_put_back() -> None:
    async with engine() as client:
        link = client.host.link
        order = {"action": "link", "bytes_per_second": 3e8, "transfer_seconds": 0.5}
        assert (await client.post("/sim/engine", order)).status == 200
        assert (link.bytes_per_second, link.transfer_seconds) == (3e8, 0.5)
        refused = await client.post("/sim/engine", {"action": "link", "bytes_per_second": -1})
        assert refused.status == 400
        await client.post("/sim/engine", {"action": "link"})
        assert (link.bytes_per_second, link.transfer_seconds) == (None, None)


async def test_sidecars_measure_a_link_and_hold_pulls_back_when_it_is_slow(
    tmp_path: Path,
) -> None:
    async with open_pair(tmp_path) as pair:
        await pair.prefill.engine.post("/sim/engine", {"action": "link", "transfer_seconds": 0.4})
        reports = []
        for number in range(5):
            tokens = prompt(600, seed=number)
            await pair.turn({"prompt": tokens, "max_tokens": 2, "ignore_eos": True})
            # Until decode has read them, prefill's blocks cannot be forgotten.
            await pair.prefill.engine.until(lambda state: state["pins"] == [])
            await pair.prefill.engine.post("/reset_prefix_cache")
            report, _, _ = await pair.turn(
                {"prompt": [*tokens, *prompt(200, seed=99)], "max_tokens": 2, "ignore_eos": True},
                pair.handle,
            )
            reports.append(report)
        pulled, held = reports[0], reports[-1]
        assert pulled.pulled_tokens > 0
        assert to_seconds(pulled.pull_duration) >= 0.4
        assert held.miss_reason == common_pb2.MISS_REASON_SLOWER_THAN_RECOMPUTE
        assert held.pulled_tokens == 0
        assert held.expected_pull.ToMilliseconds() > held.expected_recompute.ToMilliseconds()

        info = await pair.prefill.stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())
        (link,) = info.links
        assert link.held_back
        assert link.bytes_per_second > 0
        assert info.prefill_tokens_per_second > 0
        decode = pair.decode.registry.workers[-1].engine
        assert link.engine == decode
        estimate = await pair.prefill.stub.EstimatePull(
            worker_pb2.EstimatePullRequest(engine=decode, num_tokens=600)
        )
        assert estimate.pull_tokens < 600
        assert to_seconds(estimate.pull) > to_seconds(estimate.recompute)
