"""The router's pure rules: ranking, compatibility, length, failures, deadlines, receipts."""

from __future__ import annotations

import math

import pytest

from kvloop.common.v1 import common_pb2
from kvloop.compatibility import Obstacle, hand_over_obstacle, pull_obstacle
from kvloop.errors import (
    DeadlineError,
    InternalError,
    InvalidFieldError,
    ModelNotFoundError,
    PreconditionError,
    UnavailableError,
)
from kvloop.router.v1 import router_pb2
from kvloop.worker.v1 import worker_pb2
from services.router import failures, receipt
from services.router.deadline import Deadline
from services.router.length import refuse_if_too_long
from services.router.request import generate_turn
from services.router.turn import admit
from services.router.turn_state import Turn
from services.router.workers import ModelWorkers
from tests.flow.router.fakes import make_worker
from tests.flow.router.stack import DECODE, PREFILL

P = make_worker("p", PREFILL)
D = make_worker("d", DECODE)


@pytest.mark.parametrize(
    ("traits", "obstacle", "hands_over"),
    [
        ({}, None, True),
        ({"block_size": 32}, Obstacle.BLOCK_SIZE, False),
        ({"kv_cache_dtype": "fp8"}, Obstacle.KV_CACHE_DTYPE, False),
        ({"kv_buffer_device": "cuda"}, Obstacle.KV_BUFFER_DEVICE, False),
        ({"contract_version": 2}, Obstacle.CONTRACT_VERSION, True),
        ({"tensor_parallel_size": 2}, Obstacle.TENSOR_PARALLEL_SIZE, True),
        ({"pipeline_parallel_size": 2}, Obstacle.PIPELINE_PARALLEL_SIZE, True),
        ({"bidirectional_kv_xfer": False}, Obstacle.PREFILL_NOT_BIDIRECTIONAL, True),
        ({"vllm_version": "0.99", "max_model_len": 7, "num_kv_blocks": 3}, None, True),
    ],
)
def test_compatibility_names_the_trait_that_differs(traits, obstacle, hands_over) -> None:
    p = make_worker("p", PREFILL, **traits)
    assert pull_obstacle(p, D) is obstacle
    assert (hand_over_obstacle(p, D) is None) is hands_over


def test_other_model_and_one_sided_bidirectionality_are_obstacles() -> None:
    assert hand_over_obstacle(make_worker("p", PREFILL, model="other"), D) is Obstacle.MODEL
    off = make_worker("d", DECODE, bidirectional_kv_xfer=False)
    assert pull_obstacle(P, off) is Obstacle.DECODE_NOT_BIDIRECTIONAL


class TestLength:
    def request(self, **sampling):
        return generate_turn(
            router_pb2.GenerateRequest(
                model="m", text="x", sampling=router_pb2.SamplingParams(**sampling)
            )
        )

    def test_limit_is_the_least_that_any_worker_has(self) -> None:
        workers = [
            make_worker("a", PREFILL, max_model_len=100),
            make_worker("b", DECODE, max_model_len=90),
            make_worker("c", DECODE, max_model_len=0),
        ]
        assert ModelWorkers("m", workers[:1], workers[1:]).context_limit == 90
        assert ModelWorkers("m", [], []).context_limit == 0

    def test_prompt_must_leave_room_for_one_token(self) -> None:
        refuse_if_too_long(self.request(), 99, 100)
        with pytest.raises(InvalidFieldError) as caught:
            refuse_if_too_long(self.request(), 100, 100)
        assert caught.value.field == "text"

    def test_answer_must_fit_the_context(self) -> None:
        refuse_if_too_long(self.request(max_tokens=100), None, 100)
        with pytest.raises(InvalidFieldError) as caught:
            refuse_if_too_long(self.request(max_tokens=101), None, 100)
        assert caught.value.field == "sampling.max_tokens"

    def test_prompt_and_answer_together_are_left_to_the_engine(self) -> None:
        refuse_if_too_long(self.request(max_tokens=60), 60, 100)

    def test_prompt_that_the_engine_cuts_is_not_refused(self) -> None:
        request = router_pb2.GenerateRequest(
            model="m", text="x", extra_body_json=b'{"truncate_prompt_tokens":50}'
        )
        refuse_if_too_long(generate_turn(request), 500, 100)


@pytest.mark.parametrize(
    ("error", "unused", "down", "for_all"),
    [
        (UnavailableError("", reason="WORKER_UNREACHABLE"), True, True, True),
        (UnavailableError("", reason="ENGINE_UNREACHABLE"), True, True, True),
        (UnavailableError("", reason="DRAINING"), True, True, True),
        (PreconditionError("", reason="WRONG_ROLE"), True, True, True),
        (InvalidFieldError("", reason="ENGINE_REJECTED"), True, False, False),
        (UnavailableError("", reason="WORKER_LOST"), False, True, True),
        (UnavailableError("", reason="WORKER_SILENT"), False, True, True),
        # One broken connection to an engine says nothing of the others.
        (UnavailableError("", reason="ENGINE_LOST"), False, True, False),
        (UnavailableError(""), False, False, False),
        (InternalError("", reason="ENGINE_FAILED"), False, False, False),
        (DeadlineError(""), False, False, False),
    ],
)
def test_what_a_failure_means(error, unused, down, for_all) -> None:
    assert failures.params_unused(error) is unused
    assert failures.worker_is_down(error) is down
    assert failures.is_down_for_all(error) is for_all


class TestDeadline:
    def test_hop_gets_what_is_left_less_the_margin(self) -> None:
        deadline = Deadline(expires_at=110, clock=lambda: 100.0, margin_seconds=1)
        assert deadline.hop_timeout() == 9
        assert deadline.hop_timeout(3) == 3
        assert not deadline.passed

    def test_nothing_left_is_an_error(self) -> None:
        deadline = Deadline(expires_at=101, clock=lambda: 100.0, margin_seconds=1)
        assert deadline.passed
        with pytest.raises(DeadlineError):
            deadline.hop_timeout()


class TestAdmit:
    def test_without_any_worker_it_is_unavailable(self) -> None:
        with pytest.raises(UnavailableError) as caught:
            admit("m", [])
        assert caught.value.reason == "NO_WORKERS"

    def test_unknown_model_names_the_known_ones(self) -> None:
        known = [ModelWorkers("a", [], [D]), ModelWorkers("b", [], [D])]
        with pytest.raises(ModelNotFoundError, match="'a', 'b'"):
            admit("m", known)

    def test_prefill_alone_is_not_enough(self) -> None:
        with pytest.raises(UnavailableError):
            admit("m", [ModelWorkers("m", [P], [])])

    def test_decode_alone_is_enough(self) -> None:
        assert admit("m", [ModelWorkers("m", [], [D])]).decode == [D]


class TestReceipt:
    def turn(self, **fields) -> Turn:
        request = generate_turn(
            router_pb2.GenerateRequest(model="m", text="x", client_request_id="mine")
        )
        return Turn("t", request, Deadline(math.inf, lambda: 0.0, 0), started=10.0, **fields)

    def test_times_add_up(self) -> None:
        turn = self.turn(prefill_seconds=0.5, decode_started=10.75, first_chunk_at=11.0)
        built = receipt.build_result(turn).receipt
        assert built.ttft.ToMilliseconds() == 1000
        assert built.prefill_leg.ToMilliseconds() == 500
        assert built.decode_leg.ToMilliseconds() == 250

    def test_no_chunk_no_ttft(self) -> None:
        assert receipt.build_result(self.turn()).receipt.ttft.ToMilliseconds() == 0

    def test_pulled_tokens_are_no_miss(self) -> None:
        report = common_pb2.PrefillReport(pulled_tokens=1)
        assert receipt.miss_reason(self.turn(report=report, handle_hit=True)) == 0

    def test_the_engines_reason_counts_if_the_handle_was_used(self) -> None:
        report = common_pb2.PrefillReport(miss_reason=common_pb2.MISS_REASON_CACHED)
        turn = self.turn(report=report, handle_hit=True)
        assert receipt.miss_reason(turn) == common_pb2.MISS_REASON_CACHED

    def test_an_engine_that_pulls_nothing_and_says_nothing_proved_nothing(self) -> None:
        turn = self.turn(report=common_pb2.PrefillReport(prompt_tokens=5), handle_hit=True)
        assert receipt.miss_reason(turn) == common_pb2.MISS_REASON_UNPROVABLE

    def test_the_routers_reason_beats_the_report_of_a_repeated_leg(self) -> None:
        turn = self.turn(
            report=common_pb2.PrefillReport(prompt_tokens=5),
            miss_reason=common_pb2.MISS_REASON_PREFILL_FAILED,
        )
        assert receipt.miss_reason(turn) == common_pb2.MISS_REASON_PREFILL_FAILED

    @pytest.mark.parametrize("name", worker_pb2.CommitOutcome.keys())
    def test_every_commit_outcome_has_a_retain_outcome(self, name) -> None:
        summary = worker_pb2.DecodeSummary(commit_outcome=worker_pb2.CommitOutcome.Value(name))
        built = receipt.build_result(self.turn(summary=summary)).receipt
        wanted = name.removeprefix("COMMIT_OUTCOME_").replace("COMMITTED", "RETAINED")
        assert router_pb2.RetainOutcome.Name(built.retain_outcome) == f"RETAIN_OUTCOME_{wanted}"

    def test_workers_and_ids(self) -> None:
        turn = self.turn(prefill_worker=P, decode_worker=D, number=3, handle_hit=True)
        result = receipt.build_result(turn)
        assert result.client_request_id == "mine"
        built = result.receipt
        assert (built.prefill_worker_id, built.decode_worker_id, built.turn) == ("p", "d", 3)
        assert built.handle_hit
