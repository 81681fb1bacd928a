"""A handle is shown once, and never gets lost."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry

from kvloop.common.v1 import common_pb2
from kvloop.errors import ConflictError, InternalError, KvloopError, UnavailableError
from kvloop.kvmeta.v1 import ledger_pb2
from services.router.handles import HandleDesk, HeldHandle
from services.router.metrics import RouterMetrics
from tests.flow.router.fakes import eventually, make_worker
from tests.flow.router.memory_ledger import MemoryLedger, conversation
from tests.flow.router.stack import DECODE

KEY = conversation("c")
D0 = make_worker("d0", DECODE)


class ScriptedLedger(MemoryLedger):
    """Waits or fails when told."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()
        self.return_gate = asyncio.Event()
        self.return_gate.set()
        self.return_error: KvloopError | None = None
        self.take_error: KvloopError | None = None

    async def take_handle(self, key, request_id, *, timeout_seconds):
        await self.gate.wait()
        if self.take_error:
            raise self.take_error
        return await super().take_handle(key, request_id, timeout_seconds=timeout_seconds)

    async def return_handle(self, key, handle_id, request_id, *, timeout_seconds):
        await self.return_gate.wait()
        if self.return_error:
            raise self.return_error
        await super().return_handle(key, handle_id, request_id, timeout_seconds=timeout_seconds)


@asynccontextmanager
async def desk(ledger: ScriptedLedger, *, patience_seconds: float = 5.0):
    metrics = RouterMetrics(CollectorRegistry())
    async with asyncio.TaskGroup() as tasks:
        yield (
            HandleDesk(
                ledger,
                metrics,
                tasks,
                patience_seconds=patience_seconds,
                call_timeout_seconds=10,
            ),
            lambda outcome: metrics.registry.get_sample_value(
                "kvloop_router_handle_returns_total", {"outcome": outcome}
            ),
        )


def test_a_handle_cannot_be_shown_twice() -> None:
    held = HeldHandle(ledger_pb2.Handle(transfer_params_json=b"{}"))
    assert held.show() == b"{}"
    assert not held.in_hand
    with pytest.raises(InternalError):
        held.show()


def test_a_handle_that_was_surely_not_seen_can_be_shown_again() -> None:
    held = HeldHandle(ledger_pb2.Handle(transfer_params_json=b"{}"))
    held.show()
    held.unshow()
    assert held.show() == b"{}"


async def test_unshown_handle_goes_back_at_the_end_of_the_block() -> None:
    ledger = ScriptedLedger()
    handle = ledger.commit(KEY, D0, b"{}", turn=1)
    async with desk(ledger) as (handles, returned):
        async with handles.open_turn(KEY, "t") as opened:
            assert opened.number == 2
        assert ledger.returned == [handle.handle_id]
        assert returned("unused") == 1


async def test_unshown_handle_goes_back_if_the_block_fails() -> None:
    ledger = ScriptedLedger()
    handle = ledger.commit(KEY, D0, b"{}", turn=1)
    async with desk(ledger) as (handles, _):
        with pytest.raises(ValueError, match="boom"):
            async with handles.open_turn(KEY, "t"):
                raise ValueError("boom")
        assert ledger.returned == [handle.handle_id]


async def test_shown_handle_does_not_go_back() -> None:
    ledger = ScriptedLedger()
    ledger.commit(KEY, D0, b"{}", turn=1)
    async with desk(ledger) as (handles, _):
        async with handles.open_turn(KEY, "t") as opened:
            assert opened.held is not None
            opened.held.show()
        assert ledger.returned == []


async def test_a_handle_given_back_early_goes_back_once() -> None:
    ledger = ScriptedLedger()
    ledger.commit(KEY, D0, b"{}", turn=1)
    async with desk(ledger) as (handles, returned):
        async with handles.open_turn(KEY, "t") as opened:
            await handles.give_back(KEY, "t", opened)
            assert opened.held is None
        assert len(ledger.returned) == returned("unused") == 1


async def test_failing_ledger_is_a_miss_not_an_error() -> None:
    ledger = ScriptedLedger()
    ledger.take_error = UnavailableError("down")
    async with desk(ledger) as (handles, _), handles.open_turn(KEY, "t") as opened:
        assert (opened.number, opened.held) == (0, None)
        assert opened.miss_reason == common_pb2.MISS_REASON_LEDGER_UNAVAILABLE


async def test_late_answer_goes_back_and_the_turn_does_not_wait_for_it() -> None:
    ledger = ScriptedLedger()
    handle = ledger.commit(KEY, D0, b"{}", turn=1)
    ledger.gate.clear()
    async with desk(ledger, patience_seconds=0.01) as (handles, returned):
        async with handles.open_turn(KEY, "t") as opened:
            assert opened.miss_reason == common_pb2.MISS_REASON_LEDGER_UNAVAILABLE
            assert opened.held is None
        ledger.gate.set()
        await eventually(lambda: ledger.returned == [handle.handle_id])
        await eventually(lambda: returned("late") == 1)


async def test_a_turn_does_not_wait_for_a_ledger_that_hangs_on_the_return() -> None:
    ledger = ScriptedLedger()
    handle = ledger.commit(KEY, D0, b"{}", turn=1)
    ledger.return_gate.clear()
    async with desk(ledger, patience_seconds=0.05) as (handles, returned):
        async with handles.open_turn(KEY, "t") as opened:
            ledger.gate.clear()
            await handles.give_back(KEY, "t", opened)
            assert opened.held is None
            assert ledger.returned == []
        ledger.return_gate.set()
        await eventually(lambda: ledger.returned == [handle.handle_id])
        await eventually(lambda: returned("unused") == 1)


@pytest.mark.parametrize("ticks", range(6))
@pytest.mark.parametrize("slow", [False, True])
async def test_turn_that_is_cancelled_at_any_moment_loses_no_handle(ticks, slow) -> None:
    ledger = ScriptedLedger()
    ledger.commit(KEY, D0, b"{}", turn=1)
    if slow:
        ledger.gate.clear()
    async with desk(ledger) as (handles, _):

        async def turn() -> None:
            async with handles.open_turn(KEY, "t"):
                await asyncio.Event().wait()

        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(turn())
            for _ in range(ticks):
                await asyncio.sleep(0)
            task.cancel()
        ledger.gate.set()
    assert ledger.returned == ledger.taken
    assert ledger.taken or ticks <= 1


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(ConflictError("gone"), "not_held"), (UnavailableError("down"), "failed")],
)
async def test_a_return_that_fails_is_counted_and_harms_nobody(error, outcome) -> None:
    ledger = ScriptedLedger()
    ledger.commit(KEY, D0, b"{}", turn=1)
    ledger.return_error = error
    async with desk(ledger) as (handles, returned):
        async with handles.open_turn(KEY, "t"):
            pass
        assert returned(outcome) == 1
        assert returned("unused") == 0
