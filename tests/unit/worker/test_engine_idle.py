"""An engine waits long only if there is nothing at all to do, and never too long."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest

from services.worker.engine_idle import IDLE_STEP_SECONDS, EngineIdle
from services.worker.engine_waits import TransferPoll
from services.worker.running_engine import RunningEngine, find_running_engine

SETTLE = 3
PAUSE = 0.005


class FakeEngine:
    def __init__(self) -> None:
        self.busy = False
        self.arrives = False
        self.waits: list[float] = []
        self.wakes = 0

    def has_requests(self) -> bool:
        return self.busy

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        return self.arrives

    def wake(self) -> None:
        self.wakes += 1


def _idle(engine: FakeEngine | None, pause: float = PAUSE) -> tuple[EngineIdle, list[float]]:
    sleeps: list[float] = []
    idle = EngineIdle(engine, pause_seconds=pause, settle_steps=SETTLE, sleep=sleeps.append)
    return idle, sleeps


def test_engine_with_pins_alone_waits_long_once_it_has_settled() -> None:
    engine = FakeEngine()
    idle, _ = _idle(engine)
    assert [idle.pause(0, 5) for _ in range(SETTLE + 2)] == [False] * SETTLE + [True] * 2
    assert engine.waits == [PAUSE] * SETTLE + [IDLE_STEP_SECONDS] * 2


def test_step_with_tokens_never_waits_and_starts_over() -> None:
    engine = FakeEngine()
    idle, _ = _idle(engine)
    for _ in range(SETTLE + 1):
        idle.pause(0, 5)
    assert idle.pause(1, 5) is False
    assert engine.waits[-1] == IDLE_STEP_SECONDS, "no wait of its own"
    assert idle.pause(0, 5) is False
    assert engine.waits[-1] == PAUSE


@pytest.mark.parametrize(("busy", "pins"), [(True, 5), (False, 0)])
def test_engine_that_may_wait_for_a_transfer_keeps_the_pace(busy: bool, pins: int) -> None:
    engine = FakeEngine()
    engine.busy = busy
    idle, _ = _idle(engine)
    assert not any(idle.pause(0, pins) for _ in range(10))
    assert set(engine.waits) == {PAUSE}


def test_engine_without_pause_does_not_wait_while_it_settles() -> None:
    engine = FakeEngine()
    idle, sleeps = _idle(engine, pause=0.0)
    for _ in range(SETTLE + 1):
        idle.pause(0, 5)
    assert (engine.waits, sleeps) == ([IDLE_STEP_SECONDS], [])


def test_arrival_ends_idleness() -> None:
    engine = FakeEngine()
    idle, _ = _idle(engine)
    for _ in range(SETTLE):
        idle.pause(0, 5)
    engine.arrives = True
    assert idle.pause(0, 5) is False
    engine.arrives = False
    assert idle.pause(0, 5) is False, "it has to settle again"


def test_news_for_the_workers_keeps_the_pace_until_it_is_done() -> None:
    engine = FakeEngine()
    idle, _ = _idle(engine)
    for _ in range(SETTLE + 1):
        idle.pause(0, 5)
    idle.stir()
    assert [idle.pause(0, 5) for _ in range(SETTLE + 1)] == [False] * SETTLE + [True]


def test_engine_that_was_not_found_sleeps_a_little() -> None:
    idle, sleeps = _idle(None)
    for _ in range(SETTLE + 3):
        assert idle.pause(0, 5) is False
    idle.wake()
    assert sleeps == [PAUSE] * (SETTLE + 3)


def test_wake_reaches_the_engine() -> None:
    engine = FakeEngine()
    idle, _ = _idle(engine)
    idle.wake()
    assert engine.wakes == 1


class Core:
    """As vLLM's EngineCoreProc: it has the queue before it builds the rest."""

    def __init__(self) -> None:
        self.input_queue: queue.Queue[str] = queue.Queue()
        self.found = _build_connector()


class DPEngineCoreProc(Core):
    """Its ranks step together."""


class InProcess:
    def __init__(self) -> None:
        self.found = _build_connector()


def _build_connector() -> RunningEngine | None:
    return find_running_engine()


def test_engine_is_found_among_those_who_build_the_connector() -> None:
    core = Core()
    assert core.found is not None
    core.input_queue.put("request")
    assert core.found.wait(0) is True


@pytest.mark.parametrize("kind", [DPEngineCoreProc, InProcess])
def test_engine_that_must_not_wait_is_not_found(kind: Any) -> None:
    assert kind().found is None


def test_wait_ends_with_a_message_or_a_wake_from_another_thread() -> None:
    core = Core()
    assert core.found is not None
    assert core.found.wait(0.001) is False
    threading.Timer(0.02, core.input_queue.put, args=["request"]).start()
    assert core.found.wait(20) is True
    assert core.input_queue.get() == "request"
    threading.Timer(0.02, core.found.wake).start()
    assert core.found.wait(20) is True
    assert core.found.wait(0.001) is False, "a wake counts once"


def test_wake_before_the_wait_is_not_lost() -> None:
    core = Core()
    assert core.found is not None
    core.found.wake()
    assert core.found.wait(20) is True


class Agent:
    """As a NIXL agent: hands out each notification once."""

    def __init__(self) -> None:
        self.arrived: dict[str, list[bytes]] = {}
        self.calls = 0

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        self.calls += 1
        found, self.arrived = self.arrived, {}
        return found


class Worker:
    def __init__(self) -> None:
        self.nixl_wrapper = Agent()
        self._reqs_to_process = {"pinned"}


def test_what_is_found_between_steps_is_handed_out_with_the_next() -> None:
    worker = Worker()
    agent = worker.nixl_wrapper
    poll = TransferPoll(worker)
    assert agent.get_new_notifs() == {}
    agent.arrived = {"p": [b"a:1"]}
    assert poll.poll() is True
    agent.arrived = {"p": [b"b:1"], "q": [b"c:1"]}
    assert poll.poll() is True
    agent.arrived = {"q": [b"d:1"]}
    assert agent.get_new_notifs() == {"p": [b"a:1", b"b:1"], "q": [b"c:1", b"d:1"]}
    assert agent.get_new_notifs() == {}


def test_transfers_are_polled_only_by_the_thread_that_steps_and_only_with_pins() -> None:
    worker = Worker()
    poll = TransferPoll(worker)
    assert poll.poll() is False, "no step has run yet"
    worker.nixl_wrapper.get_new_notifs()
    assert poll.poll() is True
    seen = []
    other = threading.Thread(target=lambda: seen.append(poll.poll()))
    other.start()
    other.join()
    worker._reqs_to_process.clear()
    assert [*seen, poll.poll()] == [False, False]
