"""Background tasks, pauses between attempts, durations, admission."""

from __future__ import annotations

import asyncio

import pytest

from kvloop.durations import to_duration, to_seconds
from kvloop.errors import UnavailableError
from services.worker.admission import Admission
from services.worker.metrics import WorkerMetrics
from services.worker.tasks import background_tasks


async def test_background_tasks_end_with_their_block() -> None:
    ended = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async with background_tasks() as tasks:
        tasks.start(work(), name="one")
        tasks.start(work(), name="two")
        await asyncio.sleep(0)
    assert ended == [True, True]


async def test_a_task_that_fails_ends_the_block_with_its_own_error() -> None:
    async def fail() -> None:
        raise ValueError("broken")

    async def block() -> None:
        async with background_tasks() as outer, background_tasks() as inner:
            outer.start(asyncio.sleep(100), name="bystander")
            inner.start(fail(), name="failing")
            await asyncio.Event().wait()

    with pytest.raises(ValueError, match="broken"):
        await block()


async def test_an_error_of_the_block_is_raised_as_itself() -> None:
    async def block() -> None:
        async with background_tasks() as tasks:
            tasks.start(asyncio.sleep(100), name="bystander")
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await block()


async def test_several_errors_stay_together() -> None:
    async def fail(text: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError(text)

    async def block() -> None:
        async with background_tasks() as tasks:
            tasks.start(fail("one"), name="one")
            tasks.start(fail("two"), name="two")
            await asyncio.sleep(0)

    with pytest.raises(ExceptionGroup) as caught:
        await block()
    assert {str(error) for error in caught.value.exceptions} == {"one", "two"}


async def test_results_of_background_tasks_can_be_awaited() -> None:
    async with background_tasks() as tasks:
        assert await tasks.start(asyncio.sleep(0, "result"), name="quick") == "result"


@pytest.mark.parametrize("seconds", [0.0, 0.25, 479.123456789, 86400.0])
def test_durations_keep_nanoseconds(seconds: float) -> None:
    assert to_seconds(to_duration(seconds)) == seconds


def test_admission_counts_legs_and_refuses_new_ones_while_draining() -> None:
    metrics = WorkerMetrics()
    admission = Admission(metrics)
    with admission.leg(), admission.leg():
        assert admission.in_flight == 2
        assert metrics.registry.get_sample_value("kvloop_worker_legs_in_flight") == 2
        admission.drain()
        with pytest.raises(UnavailableError) as caught, admission.leg():
            pass
        assert admission.in_flight == 2
    assert caught.value.reason == "DRAINING"
    assert admission.in_flight == 0
    assert metrics.registry.get_sample_value("kvloop_worker_legs_in_flight") == 0
