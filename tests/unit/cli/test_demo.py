"""The demo against a router that pretends to reuse."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from rich.console import Console

from kvloop import AsyncClient
from kvloop.cli.demo import exit_status_of, progress_line, result_table, verdict
from kvloop.demo import DemoResult, DemoScript, TurnComparison, run_demo
from kvloop.router.v1 import router_pb2
from kvloop.stack import StackSettings
from tests.unit.client.fake_router import FakeRouter, chat_chunk, serve_router, turn_result

SCRIPT = DemoScript(turns=3, first_characters=400, further_characters=200, answer_tokens=2)
CPU = StackSettings(model="tiny")
GPU = StackSettings(model="tiny", gpus=("0",))


class ReusingRouter(FakeRouter):
    """Pulls from the second turn on; a turn without reuse takes twice as long.

    `now` is the clock of the test; `answers` maps a conversation id and a turn to
    a token, 7 by default.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.answers: dict[tuple[str, int], int] = {}
        self.pulls = True

    async def Chat(self, request, context) -> AsyncIterator[router_pb2.ChatResponse]:
        turn = (len(request.messages) + 1) // 2
        reuse = turn > 1 and not request.disable_reuse and self.pulls
        self.now += 1.0 if reuse else 2.0
        token = self.answers.get((request.conversation_id, turn), 7)
        self.chunks = [chat_chunk("x", token_ids=[token]), chat_chunk("y", token_ids=[8])]
        self.result = turn_result(
            pulled=64 if reuse else 0,
            recomputed=36 if reuse else 100,
            turn=turn,
            miss=None if reuse else "EXPIRED",
        )
        async for response in super().Chat(request, context):
            yield response


async def _demo(router: ReusingRouter) -> DemoResult:
    async with serve_router(router) as address, AsyncClient(address) as client:
        return await run_demo(
            client, "tiny", SCRIPT, name="d", clock=lambda: router.now, on_turn=lambda turn: None
        )


async def test_every_turn_is_compared_both_ways() -> None:
    result = await _demo(ReusingRouter())
    assert [turn.pulled_tokens for turn in result.turns] == [0, 64, 64]
    assert [turn.ratio for turn in result.turns] == [1.0, 2.0, 2.0]
    assert result.identical
    assert result.reused
    assert exit_status_of(result, CPU) == 0


async def test_both_ways_send_the_same_words_but_share_no_cache() -> None:
    router = ReusingRouter()
    await _demo(router)
    turns = [r for r in router.requests if isinstance(r, router_pb2.ChatRequest)]
    measured = [r for r in turns if "warm-up" not in r.conversation_id]
    off = [r for r in measured if r.disable_reuse]
    on = [r for r in measured if not r.disable_reuse]
    assert [r.messages for r in off] == [r.messages for r in on]
    assert {r.conversation_id for r in off} == {"d-off"}
    assert {r.conversation_id for r in on} == {"d-on"}
    assert b'"cache_salt":"d-off"' in off[0].extra_body_json
    assert b'"cache_salt":"d-on"' in on[0].extra_body_json
    assert all(r.sampling.temperature == 0 for r in measured)


async def test_the_two_ways_take_turns_at_going_first_and_warm_up_before() -> None:
    router = ReusingRouter()
    await _demo(router)
    turns = [r for r in router.requests if isinstance(r, router_pb2.ChatRequest)]
    assert all("warm-up" in r.conversation_id for r in turns[:4])
    assert [r.disable_reuse for r in turns[4:]] == [True, False, False, True, True, False]


async def test_conversations_are_ended() -> None:
    router = ReusingRouter()
    await _demo(router)
    ended = [
        r.conversation_id
        for r in router.requests
        if isinstance(r, router_pb2.EndConversationRequest)
    ]
    assert ended[-2:] == ["d-off", "d-on"]


async def test_answer_that_differs_by_a_token_fails_the_demo_on_a_cpu() -> None:
    router = ReusingRouter()
    router.answers["d-on", 2] = 9
    result = await _demo(router)
    assert [turn.identical for turn in result.turns] == [True, False, True]
    assert verdict(result, exact=True).startswith("FAILED: greedy answers")
    assert "turn 2" in verdict(result, exact=True)
    assert exit_status_of(result, CPU) == 1


async def test_answer_that_differs_on_a_gpu_is_told_with_its_reason() -> None:
    router = ReusingRouter()
    router.answers["d-on", 2] = 9
    result = await _demo(router)
    assert "bf16" in verdict(result, exact=False)
    assert exit_status_of(result, GPU) == 0


async def test_demo_that_pulled_nothing_fails_and_names_the_reason() -> None:
    router = ReusingRouter()
    router.pulls = False
    result = await _demo(router)
    assert "nothing was pulled in turn 2 (expired), 3 (expired)" in verdict(result, exact=True)
    assert exit_status_of(result, CPU) == exit_status_of(result, GPU) == 1


def test_table_has_one_row_per_turn(capsys) -> None:
    first = TurnComparison(1, 2000, 0, 2000, "FIRST_TURN", 1.0, 1.0, True)
    second = replace(
        first,
        turn=2,
        context_tokens=3300,
        pulled_tokens=2048,
        recomputed_tokens=1252,
        miss_reason=None,
        ttft_on_seconds=0.4,
    )
    Console(width=100).print(result_table(DemoResult((first, second))))
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "ms" in line]
    assert lines == [
        ["1", "2,000", "0", "2,000", "1,000", "ms", "1,000", "ms", "1.0x"],
        ["2", "3,300", "2,048", "1,252", "1,000", "ms", "400", "ms", "2.5x"],
    ]
    assert progress_line(second) == "turn 2: first token after 1,000 ms without reuse, 400 ms with"


def test_script_is_the_same_in_every_run_and_grows() -> None:
    messages = DemoScript().messages()
    assert messages == DemoScript().messages()
    assert len(messages) == 4
    assert len(set(messages)) == 4
    assert len(messages[0]) > 13_000


def test_script_of_one_turn_is_refused() -> None:
    with pytest.raises(ValueError, match="two turns"):
        DemoScript(turns=1)
