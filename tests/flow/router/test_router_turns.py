"""A turn through a real router: hits, misses, receipts, and bytes kept as they are."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from kvloop.common.v1 import common_pb2
from kvloop.durations import to_duration, to_seconds
from kvloop.kvmeta.v1 import ledger_pb2
from kvloop.router.v1 import router_pb2
from tests.flow.router.fakes import eventually, waits
from tests.flow.router.memory_ledger import conversation
from tests.flow.router.stack import running


async def test_second_turn_pulls_what_the_first_left_behind() -> None:
    async with running() as stack:
        first = await stack.chat("c")
        second = await stack.chat("c")
        assert first.miss == "FIRST_TURN"
        assert not first.receipt.handle_hit
        assert second.miss == "UNSPECIFIED"
        assert second.receipt.handle_hit
        assert second.receipt.prefill.pulled_tokens == 80
        assert [first.receipt.turn, second.receipt.turn] == [1, 2]
        assert stack.count("misses_total", reason="first_turn") == 1
        assert stack.count("turns_total", outcome="answered") == 2
        assert stack.count("prompt_tokens_total", source="pulled") == 80


async def test_receipt_and_result_say_what_was_done() -> None:
    async with running() as stack:
        answer = await stack.chat("c", client_request_id="mine")
        receipt = answer.receipt
        assert answer.chunks == stack["d0"].chunks
        assert answer.result.client_request_id == "mine"
        assert answer.result.usage.prompt_tokens == 100
        assert answer.result.usage.completion_tokens == 2
        assert receipt.prefill_worker_id == "p0"
        assert receipt.decode_worker_id == "d0"
        assert receipt.retain_outcome == router_pb2.RETAIN_OUTCOME_RETAINED
        assert receipt.retained_tokens == 102
        assert receipt.retained_ttl.ToSeconds() == 480
        ttft, legs = receipt.ttft.ToNanoseconds(), receipt.prefill_leg.ToNanoseconds()
        assert 0 < legs < ttft
        assert 0 < receipt.decode_leg.ToNanoseconds() < ttft
        assert receipt.turn_id == stack["p0"].prefills[0].turn_id == stack["d0"].decodes[0].turn_id


async def test_client_request_id_is_never_used_inside() -> None:
    async with running() as stack:
        await stack.chat("c", client_request_id="mine")
        assert b"mine" not in stack["p0"].prefills[0].SerializeToString()
        assert b"mine" not in stack["d0"].decodes[0].SerializeToString()


async def test_params_travel_verbatim_from_ledger_to_p_and_from_p_to_d() -> None:
    from_ledger = (
        b'{ "z":1, "a":[[3,2],[ ]],"deadline":12345.000,"n":null,"big":18446744073709551617}'
    )
    from_prefill = b'{"remote_block_ids":[[7 , 8]], "x":{"y":1e5}, "tp_size":1}'
    async with running() as stack:
        stack.give_handle("c", "d0", from_ledger)
        stack["p0"].handover = from_prefill
        await stack.chat("c")
        assert stack["p0"].prefills[0].transfer_params_json == from_ledger
        assert stack["d0"].decodes[0].transfer_params_json == from_prefill


async def test_both_legs_get_the_same_body() -> None:
    async with running() as stack:
        await stack.chat("c", extra_body_json=b'{"seed_bias":1.50,"top_k":3}')
        body = stack["p0"].prefills[0].body_json
        assert body == stack["d0"].decodes[0].body_json
        assert b'"seed_bias":1.50' in body
        assert stack["p0"].prefills[0].api == common_pb2.API_CHAT_COMPLETIONS


async def test_generate_runs_on_token_ids() -> None:
    async with running() as stack:
        request = router_pb2.GenerateRequest(
            model="tiny", token_ids=router_pb2.TokenIds(ids=[1, 2, 3]), conversation_id="c"
        )
        events = [event async for event in stack.stub.Generate(request)]
        assert [event.WhichOneof("event") for event in events] == ["chunk", "chunk", "result"]
        assert stack["p0"].prefills[0].body_json == b'{"model":"tiny","prompt":[1,2,3]}'
        assert stack["d0"].decodes[0].api == common_pb2.API_COMPLETIONS


async def test_the_turn_is_committed_under_tenant_model_and_conversation() -> None:
    async with running() as stack:
        await stack.chat("c")
        commit = stack["d0"].decodes[0].commit
        assert commit.key == conversation("c")
        assert commit.turn == 1


@pytest.mark.parametrize(
    ("fields", "conversation_id", "miss"),
    [
        ({"disable_reuse": True}, "c", "REUSE_DISABLED"),
        ({}, "", "NO_CONVERSATION"),
        ({"extra_body_json": b'{"n":2}'}, "c", "UNSUPPORTED"),
        ({"extra_body_json": b'{"prompt_logprobs":1}'}, "c", "UNSUPPORTED"),
        ({"extra_body_json": b'{"echo":true}'}, "c", "UNSUPPORTED"),
    ],
)
async def test_a_turn_that_retains_nothing_leaves_the_ledger_alone(
    fields, conversation_id, miss
) -> None:
    async with running() as stack:
        stack.give_handle("c", "d0")
        answer = await stack.chat(conversation_id, **fields)
        assert answer.miss == miss
        assert stack.ledger.taken == []
        assert not stack["d0"].decodes[0].HasField("commit")
        assert answer.receipt.turn == 0
        assert stack.count("misses_total", reason=miss.lower()) == 1


@pytest.mark.parametrize("extra", [b'{"n":2}', b'{"prompt_logprobs":0}', b'{"echo":true}'])
async def test_what_cannot_be_split_runs_on_the_decode_worker_alone(extra) -> None:
    async with running() as stack:
        answer = await stack.chat("c", extra_body_json=extra)
        assert stack["p0"].calls == 0
        assert stack["d0"].decodes[0].transfer_params_json == b""
        assert answer.receipt.prefill_worker_id == ""
        assert stack.count("fallbacks_total", cause="prefill_left_out") == 0


@pytest.mark.parametrize("state", ["TAKEN", "SPENT", "RELEASED", "EXPIRED", "VOID"])
async def test_the_ledgers_reason_reaches_the_receipt(state) -> None:
    async with running() as stack:
        stack.give_handle("c", "d0")
        stack.ledger.row("c").state = ledger_pb2.Conversation.State.Value(f"STATE_{state}")
        answer = await stack.chat("c")
        assert answer.miss == state
        assert stack["p0"].params_seen == []


@pytest.mark.parametrize(
    "reason",
    [
        "PREFIX_MISMATCH",
        "BELOW_THRESHOLD",
        "CACHED",
        "ENGINE_EXPIRED",
        "PULL_FAILED",
        "UNPROVABLE",
        "SLOWER_THAN_RECOMPUTE",
    ],
)
async def test_the_prefill_engines_reason_reaches_the_receipt(reason) -> None:
    async with running() as stack:
        stack.give_handle("c", "d0")
        stack["p0"].pull_report = common_pb2.PrefillReport(
            prompt_tokens=10,
            recomputed_tokens=10,
            miss_reason=common_pb2.MissReason.Value(f"MISS_REASON_{reason}"),
        )
        answer = await stack.chat("c")
        assert answer.miss == reason
        assert answer.receipt.handle_hit
        assert stack.count("misses_total", reason=reason.lower()) == 1


async def test_the_receipt_tells_what_a_pull_took_and_was_expected_to_take() -> None:
    async with running() as stack:
        stack.give_handle("c", "d0")
        stack["p0"].pull_report = common_pb2.PrefillReport(
            prompt_tokens=10,
            pulled_tokens=10,
            pull_duration=to_duration(0.5),
            expected_pull=to_duration(0.25),
            expected_recompute=to_duration(2.0),
        )
        prefill = (await stack.chat("c")).receipt.prefill
        assert to_seconds(prefill.pull_duration) == 0.5
        assert to_seconds(prefill.expected_pull) == 0.25
        assert to_seconds(prefill.expected_recompute) == 2.0


async def test_the_handles_engine_and_its_moved_deadline_reach_the_prefill_worker() -> None:
    async with running() as stack:
        stack.give_handle("c", "d0")
        handle = stack.ledger.row("c").handle
        assert handle is not None
        handle.deadline_extension.CopyFrom(to_duration(40.5))
        await stack.chat("c")
        await stack.chat("other")
        with_handle, without = stack["p0"].prefills
        assert with_handle.engine == stack["d0"].worker.engine
        assert to_seconds(with_handle.deadline_extension) == 40.5
        assert not without.HasField("engine")
        assert not without.HasField("deadline_extension")


async def test_two_turns_at_once_never_share_a_handle() -> None:
    async with running() as stack:
        stack.give_handle("c", "d0")
        gate = asyncio.Event()
        stack["p0"].prefill_steps = [waits(gate), waits(gate)]
        async with asyncio.TaskGroup() as tasks:
            turns = [tasks.create_task(stack.chat("c")) for _ in range(2)]
            await eventually(lambda: len(stack["p0"].prefills) == 2)
            gate.set()
        misses = sorted(turn.result().miss for turn in turns)
        assert misses == ["TAKEN", "UNSPECIFIED"]
        assert len(stack["p0"].params_seen) == 1


async def test_many_racing_turns_show_each_handle_once() -> None:
    async with running(prefill=["p0", "p1"]) as stack:
        await stack.chat("c")
        async with asyncio.TaskGroup() as tasks:
            for _ in range(20):
                tasks.create_task(stack.chat("c"))
        seen = stack["p0"].params_seen + stack["p1"].params_seen
        assert len(seen) == len(set(seen)) > 0


async def test_decode_stays_with_the_conversation() -> None:
    async with running(decode=["d0", "d1", "d2"], rng=iter_rng()) as stack:
        first = await stack.chat("c")
        for _ in range(4):
            again = await stack.chat("c")
            assert again.receipt.decode_worker_id == first.receipt.decode_worker_id


async def test_prefill_goes_to_the_least_loaded_worker() -> None:
    async with running(prefill=["p0", "p1"]) as stack:
        gate = asyncio.Event()
        stack["p0"].prefill_steps = [waits(gate)]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stack.chat("a"))
            await eventually(lambda: stack["p0"].prefills)
            answer = await stack.chat("b")
            assert answer.receipt.prefill_worker_id == "p1"
            gate.set()


async def test_ending_a_conversation_releases_its_handle() -> None:
    async with running() as stack:
        await stack.chat("c")
        request = router_pb2.EndConversationRequest(model="tiny", conversation_id="c")
        ended = await stack.stub.EndConversation(request)
        assert (ended.found, ended.released) == (True, True)
        assert (await stack.chat("c")).miss == "RELEASED"
        unknown = router_pb2.EndConversationRequest(model="tiny", conversation_id="never")
        assert not (await stack.stub.EndConversation(unknown)).found


async def test_one_event_per_turn_is_logged_without_its_content() -> None:
    with capture_logs() as logged:
        async with running() as stack:
            await stack.chat("c", extra_body_json=b'{"user":"SECRET-USER"}')
    turns = [entry for entry in logged if entry["event"] == "turn"]
    assert len(turns) == 1
    assert turns[0]["miss_reason"] == "MISS_REASON_FIRST_TURN"
    assert turns[0]["prefill_worker_id"] == "p0"
    assert turns[0]["recomputed_tokens"] == 100
    assert turns[0]["outcome"] == "answered"
    for secret in ("hello", "SECRET-USER", "remote_request_id", "delta"):
        assert secret not in repr(logged)


async def test_a_5_mb_prompt_passes() -> None:
    async with running(traits={"p0": {"max_model_len": 0}, "d0": {"max_model_len": 0}}) as stack:
        content = "word " * 1_000_000
        await stack.chat("c", messages=[router_pb2.ChatMessage(role="user", content=content)])
        assert len(stack["d0"].decodes[0].body_json) > 5_000_000


def iter_rng():
    """Different numbers, the same in each run."""
    state = [0]

    def rng() -> float:
        state[0] = (state[0] * 1103515245 + 12345) % 2**31
        return state[0] / 2**31

    return rng
