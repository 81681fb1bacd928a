"""How long a worker may be silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from kvloop.errors import UnavailableError
from services.router.failures import params_unused, worker_is_down
from services.router.patience import Patience, SilenceGuard, silent
from tests.unit.leaping_loop import leaping

PATIENCE = Patience(
    prefill_seconds=60, first_chunk_seconds=300, next_chunk_seconds=30, prompt_bytes_per_second=4000
)


async def _guarded(
    gaps: list[float], *, first: float | None, following: float
) -> AsyncGenerator[int, None]:
    """Numbers, each after a gap, as a leg passes them on."""
    async with SilenceGuard("p0", first_seconds=first, next_seconds=following) as guard:
        for number, gap in enumerate(gaps):
            await asyncio.sleep(gap)
            guard.heard()
            yield number
            guard.listens()


def test_legs_get_more_time_for_longer_prompts() -> None:
    assert PATIENCE.with_prefill(0) == 60
    assert PATIENCE.with_prefill(400_000) == 160
    assert PATIENCE.with_first_chunk(400_000) == 400


def test_a_silent_worker_is_avoided_and_may_have_seen_the_handle() -> None:
    error = silent("p0", 60)
    assert worker_is_down(error)
    assert not params_unused(error)


@pytest.mark.parametrize("gaps", [[30.0], [0.0, 30.0], [0.0, 0.0, 30.0]])
@leaping
async def test_a_silence_ends_the_stream_after_what_came_before(gaps: list[float]) -> None:
    came: list[int] = []

    async def receive() -> None:
        async for number in _guarded(gaps, first=0.05, following=0.05):
            came.append(number)  # noqa: PERF401

    with pytest.raises(UnavailableError) as caught:
        await receive()
    assert caught.value.reason == "WORKER_SILENT"
    assert came == list(range(len(gaps) - 1))


@leaping
async def test_a_stream_may_take_long_that_is_never_silent_for_long() -> None:
    came = [number async for number in _guarded([0.1] * 15, first=1.2, following=1.2)]
    assert len(came) == 15


@leaping
async def test_the_first_message_may_take_its_time_if_nothing_limits_it() -> None:
    assert [n async for n in _guarded([0.2], first=None, following=0.05)] == [0]


@leaping
async def test_the_time_of_a_slow_reader_does_not_count() -> None:
    came = []
    async for number in _guarded([0.0] * 3, first=0.2, following=0.2):
        came.append(number)
        await asyncio.sleep(0.3)
    assert came == [0, 1, 2]


@leaping
async def test_a_reader_that_leaves_leaves_no_timer() -> None:
    async with aclosing(_guarded([0.0, 30.0], first=0.05, following=0.05)) as numbers:
        async for _ in numbers:
            break
    await asyncio.sleep(0.1)  # nothing strikes
