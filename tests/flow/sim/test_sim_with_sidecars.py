"""Sidecars attached to simulated engines: they cannot tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvloop import rpc
from kvloop.common.v1 import common_pb2
from kvloop.errors import InternalError, InvalidFieldError, ModelNotFoundError, UnavailableError
from kvloop.worker.v1 import worker_pb2
from tests.flow.sim.engines import EngineClient, poll, prompt
from tests.flow.sim.jump_clock import JumpClock
from tests.flow.sim.pairs import Pair, api_of, open_pair, open_sidecar

_COMMITTED = worker_pb2.COMMIT_OUTCOME_COMMITTED


def _text(chunks: list[dict[str, Any]]) -> str:
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    return "".join(c["delta"].get("content") or "" if "delta" in c else c["text"] for c in choices)


async def test_workers_register_with_what_the_engines_say(tmp_path: Path) -> None:
    async with open_pair(tmp_path, block_size=32, decoder_kv_blocks_ttl_seconds=60) as pair:
        await poll(lambda: pair.prefill.registry.workers and pair.decode.registry.workers)
        (worker,) = pair.decode.registry.workers
        state = await pair.decode.engine.state()
        info = await pair.decode.stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())
    assert (worker.engine.engine_id, worker.engine.epoch) == (state["engine_id"], state["epoch"])
    assert (worker.traits.block_size, worker.traits.vllm_version) == (32, "0.32.0")
    assert worker.traits.decoder_kv_blocks_ttl.seconds == 60
    assert worker.traits.bidirectional_kv_xfer
    assert worker.model == "sim-model"
    assert (info.engine_running, info.engine_waiting, info.kv_cache_usage) == (0, 0, 0)


async def test_a_streamed_chat_pulls_its_second_turn_and_answers_right(
    tmp_path: Path, referee: EngineClient
) -> None:
    messages = [{"role": "user", "content": "tell me about the river and the mountain " * 20}]
    body: dict[str, Any] = {
        "model": "sim-model",
        "messages": messages,
        "max_tokens": 120,
        "stream": True,
    }
    async with open_pair(tmp_path) as pair:
        report, chunks, summary = await pair.turn(body)
        assert (report.pulled_tokens, report.miss_reason) == (0, 0)
        assert summary.commit_outcome == _COMMITTED
        assert summary.retained_tokens == report.prompt_tokens + 119
        messages += [
            {"role": "assistant", "content": _text(chunks)},
            {"role": "user", "content": "and the sea?"},
        ]
        report, chunks, summary = await pair.turn(body, pair.handle)
        assert report.proven_tokens == report.cached_tokens + report.pulled_tokens
        assert report.pulled_tokens >= 112
        assert summary.commit_outcome == _COMMITTED
        assert not any("kv_transfer_params" in chunk for chunk in chunks)
        right = await referee.post("/v1/chat/completions", body | {"stream": False})
        assert _text(chunks) == right.choice["message"]["content"]
        assert len((await pair.decode.engine.state())["pins"]) == 1
        assert (await pair.prefill.engine.state())["pins"] == []


@pytest.mark.parametrize("version", ["0.21.0", "0.33.0"])
async def test_token_prompts_work_on_old_and_new_versions(
    tmp_path: Path, referee: EngineClient, version: str
) -> None:
    body = {"prompt": prompt(300), "max_tokens": 100, "stream": True, "return_token_ids": True}
    async with open_pair(tmp_path, vllm_version=version) as pair:
        _, chunks, _ = await pair.turn(body)
        answer = [
            token
            for chunk in chunks
            if chunk["choices"]
            for token in chunk["choices"][0]["token_ids"]
        ]
        body["prompt"] = [*prompt(300), *answer[:40], 7, 8, 9]  # the end was edited away
        report, chunks, _ = await pair.turn(body, pair.handle)
        assert report.proven_tokens == 320
        right = await referee.complete(body["prompt"], max_tokens=100)
        assert _text(chunks) == right.choice["text"]


async def test_a_turn_outside_of_any_conversation_leaves_nothing_behind(tmp_path: Path) -> None:
    async with open_pair(tmp_path) as pair:
        _, _, summary = await pair.turn({"prompt": "hi", "max_tokens": 5}, conversation=None)
        assert summary.commit_outcome == worker_pb2.COMMIT_OUTCOME_NOT_REQUESTED
        await pair.decode.engine.until(lambda state: state["pins"] == [])
        assert pair.decode.ledger.commits == []


async def test_a_turn_that_ends_at_a_stop_string_is_retained(tmp_path: Path) -> None:
    """vLLM aborts the request in its core then; the connector retains it all the same."""
    async with open_pair(tmp_path) as pair:
        free, _ = await pair.decode_leg({"prompt": "hello", "max_tokens": 30}, conversation=None)
        word = _text(free).split()[9]
        body = {"prompt": "hello", "max_tokens": 30, "stop": [word]}
        _, chunks, summary = await pair.turn(body)
    assert summary.commit_outcome == _COMMITTED
    assert chunks[-2]["choices"][0]["stop_reason"] == word


async def test_released_blocks_are_freed_at_once(tmp_path: Path) -> None:
    async with open_pair(tmp_path) as pair:
        await pair.turn({"prompt": "hello", "max_tokens": 30})
        (commit,) = pair.decode.ledger.commits
        ref = common_pb2.EngineRef(engine_id=commit.engine.engine_id, epoch=commit.engine.epoch)
        reply = await pair.decode.stub.ReleaseBlocks(
            worker_pb2.ReleaseBlocksRequest(engine=ref, transfer_params_json=[commit.params])
        )
        assert reply.sent == 1
        await pair.decode.engine.until(lambda state: state["blocks"]["used"] == 0)


async def test_a_cancelled_decode_leg_stops_the_engine_and_keeps_nothing(tmp_path: Path) -> None:
    async with open_pair(tmp_path, preset="tiny-cpu") as pair:
        body = {"prompt": "hello", "max_tokens": 5000, "ignore_eos": True}
        request = worker_pb2.DecodeRequest(
            turn_id="turn-1", api=api_of(body), body_json=json.dumps(body).encode()
        )
        request.commit.key.tenant = request.commit.key.model = "default"
        request.commit.key.conversation_id = "c"
        call = pair.decode.stub.Decode(request)
        await call.read()
        call.cancel()
        state = await pair.decode.engine.until(lambda state: state["running"] == [])
    assert state["pins"] == []
    assert pair.decode.ledger.commits == []


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"model": "other"}, ModelNotFoundError),
        ({"max_tokens": -1}, InvalidFieldError),
        ({"messages": "hi"}, InvalidFieldError),
        ({"vllm_xargs": {"sim_fault": "status;code=500"}}, InternalError),
        ({"vllm_xargs": {"sim_fault": "drop"}}, UnavailableError),
    ],
)
async def test_engine_errors_are_typed_by_the_sidecar(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception]
) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]} | changes
    async with open_pair(tmp_path) as pair:
        with pytest.raises(error), rpc.typed_errors():
            await pair.turn(body)


async def test_a_stream_that_dies_is_lost_and_leaves_no_pin(tmp_path: Path) -> None:
    body = {
        "prompt": "hello",
        "max_tokens": 30,
        "vllm_xargs": {"sim_fault": "die;after_tokens=3;leg=decode"},
    }
    async with open_pair(tmp_path) as pair:
        with pytest.raises(UnavailableError) as caught, rpc.typed_errors():
            await pair.turn(body)
        assert caught.value.reason == "ENGINE_LOST"
        await pair.decode.engine.until(lambda state: state["blocks"]["used"] == 0)
        assert pair.decode.ledger.commits == []


async def test_prefill_repeats_without_the_handle_when_the_pull_fails_the_request(
    tmp_path: Path,
) -> None:
    async with (
        open_sidecar(tmp_path, "prefill", kv_load_failure_policy="fail") as first,
        open_sidecar(tmp_path, "decode") as second,
    ):
        pair = Pair(first, second)
        body = {"prompt": prompt(200), "max_tokens": 100}
        await pair.turn(body)
        await pair.prefill.engine.post("/reset_prefix_cache")
        await pair.prefill.engine.post("/sim/faults", {"kind": "fail_transfer", "count": 1})
        report, _, summary = await pair.turn(body, pair.handle)
    assert report.miss_reason == common_pb2.MISS_REASON_PULL_FAILED
    assert summary.commit_outcome == _COMMITTED


async def test_without_an_event_the_turn_is_not_committed(tmp_path: Path) -> None:
    async with open_pair(tmp_path, sidecar={"event_timeout_seconds": 3}) as pair:
        await pair.decode.engine.post("/sim/faults", {"kind": "no_event", "count": 1})
        _, _, summary = await pair.turn({"prompt": "hello", "max_tokens": 5})
        assert summary.commit_outcome == worker_pb2.COMMIT_OUTCOME_NO_EVENT
        _, _, summary = await pair.turn({"prompt": "hello", "max_tokens": 5})
        assert summary.commit_outcome == _COMMITTED


async def test_an_event_that_comes_too_late_releases_the_turn(tmp_path: Path) -> None:
    clock = JumpClock()
    async with open_pair(tmp_path, clock=clock, sidecar={"event_timeout_seconds": 0.5}) as pair:
        await pair.decode.engine.post(
            "/sim/faults", {"kind": "delay_event", "seconds": 60, "count": 1}
        )
        _, _, summary = await pair.turn({"prompt": "hello", "max_tokens": 5})
        assert summary.commit_outcome == worker_pb2.COMMIT_OUTCOME_NO_EVENT
        assert len((await pair.decode.engine.state())["pins"]) == 1
        await clock.advance(60)
        await pair.decode.engine.until(lambda state: state["pins"] == [])


async def test_a_restarted_engine_registers_under_its_new_identity(tmp_path: Path) -> None:
    async with open_pair(tmp_path) as pair:
        workers = pair.decode.registry.workers
        await poll(lambda: workers)
        await pair.decode.engine.post("/sim/engine", {"action": "restart"})
        await poll(lambda: len(workers) == 2)
        state = await pair.decode.engine.state()
        assert workers[-1].engine.epoch == state["epoch"] != workers[0].engine.epoch
        _, _, summary = await pair.turn({"prompt": "hello", "max_tokens": 5})
        assert summary.commit_outcome == _COMMITTED
