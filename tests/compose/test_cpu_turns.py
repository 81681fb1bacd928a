"""Two turns on vLLM in containers: what kvloop says was pulled, vLLM has counted."""

from __future__ import annotations

import pytest

from tests.compose.engines import pulled_tokens
from tests.compose.stack import Stack
from tests.compose.talk import Conversation, Said, Talker
from tests.compose.waiting import until

pytestmark = pytest.mark.timeout(1800)
_COUNTING_SECONDS = 30.0
"""vLLM brings its counters up to date from time to time."""


def _counted(stack: Stack, before: int, said: Said) -> bool:
    return until(lambda: pulled_tokens(stack) - before == said.pulled_tokens, _COUNTING_SECONDS)


async def test_the_second_turn_over_grpc_pulls_what_vllm_has_counted(
    cpu_stack: Stack, cpu: Talker
) -> None:
    conversation = Conversation("grpc")
    first = await cpu.over_grpc(conversation)
    before = pulled_tokens(cpu_stack)
    second = await cpu.over_grpc(conversation)

    assert first.miss_reason == "FIRST_TURN"
    assert second.miss_reason is None
    assert second.pulled_tokens > 64
    assert _counted(cpu_stack, before, second)


async def test_the_second_turn_over_http_pulls_too_without_any_id(
    cpu_stack: Stack, cpu: Talker
) -> None:
    conversation = Conversation("http")
    await cpu.over_http(conversation)
    before = pulled_tokens(cpu_stack)
    second = await cpu.over_http(conversation)

    assert second.miss_reason is None
    assert second.pulled_tokens > 64
    assert _counted(cpu_stack, before, second)
