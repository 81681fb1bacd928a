"""Two turns on vLLM in containers: what kvloop says was pulled, vLLM has counted."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence

import pytest

from tests.compose.engines import pulled_tokens
from tests.compose.stack import Stack
from tests.compose.talk import ANSWER_TOKENS, Said, Talker
from tests.compose.waiting import until

pytestmark = pytest.mark.timeout(3000)
_COUNTING_SECONDS = 30.0
"""vLLM brings its counters up to date from time to time."""
_BLOCK_TOKENS = 32

Turn = Callable[[str, Sequence[int]], Awaitable[Said]]


def _spoken(name: str, count: int) -> list[int]:
    """Tokens that a user says; ids below are special."""
    return random.Random(name).choices(range(300, 2000), k=count)


async def _two_turns(stack: Stack, turn: Turn, name: str) -> None:
    prompt = _spoken(f"{name} 1", 300)
    first = await turn(name, prompt)
    before = pulled_tokens(stack)
    prompt += [*first.token_ids, *_spoken(f"{name} 2", 40)]
    second = await turn(name, prompt)

    assert first.miss_reason == "FIRST_TURN"
    assert second.miss_reason is None
    # The prefill engine has the first prompt; the answer is only on decode.
    assert second.pulled_tokens >= ANSWER_TOKENS - _BLOCK_TOKENS
    assert until(lambda: pulled_tokens(stack) - before == second.pulled_tokens, _COUNTING_SECONDS)


async def test_the_second_turn_over_grpc_pulls_what_vllm_has_counted(
    cpu_stack: Stack, cpu: Talker
) -> None:
    await _two_turns(cpu_stack, cpu.tokens_over_grpc, "grpc")


async def test_the_second_turn_over_http_pulls_what_vllm_has_counted(
    cpu_stack: Stack, cpu: Talker
) -> None:
    await _two_turns(cpu_stack, cpu.tokens_over_http, "http")
