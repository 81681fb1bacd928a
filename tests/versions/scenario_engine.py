"""Drives what the connector does with the engine around it, against one version's sources.

Run in a process of its own, with that version first on PYTHONPATH; prints "ok". The
engine's constructor, its queues and the waits of its processes are the version's own.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
import types
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

from services.worker import engine_idle, engine_pressure
from tests.versions.stand_ins import (
    BLOCK,
    Blocks,
    Events,
    make_connector,
    make_request,
    make_scheduler_output,
    sidecar_socket,
    stand_in_for_gguf,
)

_LONG_SECONDS = 30.0
_LONG_MILLISECONDS = 30_000
_SHORT_SECONDS = 15.0
"""What does not wait takes less, also on a busy machine."""


def main() -> None:
    """Idle steps, waits for messages, and requests that find no room."""
    stand_in_for_gguf()
    with sidecar_socket() as listener:
        core = _build_engine()
        connector = core.connector
        events = Events(listener)
        assert [events.next()["type"] for _ in range(2)] == ["hello", "pins"]
        _no_pressure_without_pins(connector, events)
        _retain(connector, events)
        _waits_for_nothing(core)
        engine_idle.IDLE_STEP_SECONDS = _LONG_SECONDS
        _waits_for_nothing_else(core)
        _a_request_ends_the_wait(core)
        _the_sidecar_ends_the_wait(core, events)
        _lack_of_blocks_is_reported(core, events)
        _what_the_scheduler_is_asked_exists()
        connector.shutdown()
    _waits_for_messages_are_gentle()
    sys.stdout.write("ok\n")


class _BuiltError(Exception):
    """Ends vLLM's constructor where the scheduler would have been built."""


def _build_engine(engine_class: str = "EngineCoreProc") -> Any:
    """vLLM's own EngineCoreProc, as far as the connector; its scheduler is a stand-in."""
    from vllm.v1.engine import core as engine_core

    def build(self: Any, *_: object, **__: object) -> None:
        self.connector = make_connector("kv_consumer", "engine-d")
        self.scheduler = _Scheduler()
        raise _BuiltError

    @contextlib.contextmanager
    def handshake(*_: object, **__: object) -> Iterator[Any]:
        yield types.SimpleNamespace(
            coordinator_output=None, frontend_stats_publish_address=None, inputs=[], outputs=[]
        )

    kind = getattr(engine_core, engine_class)
    base = engine_core.EngineCore
    original, base.__init__ = base.__init__, build
    try:
        core = kind.__new__(kind)
        core._perform_handshakes = handshake
        core._init_data_parallel = lambda *_: None
        with contextlib.suppress(_BuiltError):
            kind.__init__(core, MagicMock(), True, "", MagicMock(), False)
    finally:
        base.__init__ = original
    assert isinstance(core.input_queue, queue.Queue)
    return core


class _Scheduler:
    """What the connector asks vLLM's scheduler."""

    def __init__(self) -> None:
        self.unfinished = False
        self.free = 10
        pool = types.SimpleNamespace(get_num_free_blocks=lambda: self.free)
        self.kv_cache_manager = types.SimpleNamespace(block_pool=pool)

    def has_unfinished_requests(self) -> bool:
        return self.unfinished


def _retain(connector: Any, events: Events) -> None:
    request = make_request([1] * BLOCK, {"kvloop_turn_id": "turn"}, output=[1, 2])
    connector.update_state_after_alloc(request, Blocks(2), 0)
    connector.request_finished_all_groups(request, ([1, 2],))
    assert events.next()["retained"] is True


def _step(core: Any, tokens: int = 0) -> Any:
    """One scheduling pass; returns what the workers are told and how long it took."""
    output = make_scheduler_output(tokens)
    begun = time.monotonic()
    meta = core.connector.build_connector_meta(output)
    return meta, time.monotonic() - begun


def _settle(core: Any) -> None:
    _step(core, tokens=1)
    for _ in range(4):
        meta, _ = _step(core)
        assert meta.kvloop_idle is False


def _waits_for_nothing(core: Any) -> None:
    _settle(core)
    meta, seconds = _step(core)
    assert meta.kvloop_idle is True
    assert seconds >= 0.19, seconds


def _waits_for_nothing_else(core: Any) -> None:
    for scheduler_unfinished, tokens in ((True, 0), (False, 1)):
        core.scheduler.unfinished = scheduler_unfinished
        meta, seconds = _step(core, tokens)
        assert meta.kvloop_idle is False
        assert seconds < _SHORT_SECONDS, seconds
    core.scheduler.unfinished = False


def _a_request_ends_the_wait(core: Any) -> None:
    _settle(core)
    threading.Timer(0.02, core.input_queue.put_nowait, args=["request"]).start()
    meta, seconds = _step(core)
    assert seconds < _SHORT_SECONDS, seconds
    assert meta.kvloop_idle is False
    assert core.input_queue.get_nowait() == "request"


def _the_sidecar_ends_the_wait(core: Any, events: Events) -> None:
    _settle(core)
    renew = {"type": "renew", "pins": [["unknown", 60]]}
    threading.Timer(0.02, events.send, args=[renew]).start()
    meta, seconds = _step(core)
    assert seconds < _SHORT_SECONDS, seconds
    assert meta.kvloop_idle is False


def _no_pressure_without_pins(connector: Any, events: Events) -> None:
    request = make_request([1] * 20 * BLOCK, {"do_remote_prefill": True})
    connector.get_num_new_matched_tokens(request, 0)
    _step(types.SimpleNamespace(connector=connector))
    events.expect_nothing_from(connector)


def _lack_of_blocks_is_reported(core: Any, events: Events) -> None:
    connector = core.connector
    core.scheduler.unfinished = True
    waiting = make_request([1] * 30 * BLOCK, {"do_remote_prefill": True})
    lucky = make_request([1] * 30 * BLOCK, {})
    for distance in (0.0, 3600.0):
        engine_pressure.REPORT_INTERVAL_SECONDS = distance
        connector.get_num_new_matched_tokens(lucky, 0)
        connector.update_state_after_alloc(lucky, Blocks(1), 0)
        connector.get_num_new_matched_tokens(waiting, 2 * BLOCK)
        _step(core, tokens=5)
    assert events.next() == {"type": "pressure", "blocks_needed": 28 - core.scheduler.free}
    events.expect_nothing_from(connector)
    # Some versions keep blocks back for requests that are loading.
    core.scheduler._inflight_prefill_reserved_blocks = lambda: 4
    engine_pressure.REPORT_INTERVAL_SECONDS = 0.0
    connector.get_num_new_matched_tokens(waiting, 2 * BLOCK)
    _step(core, tokens=5)
    assert events.next()["blocks_needed"] == 28 - core.scheduler.free + 4


def _what_the_scheduler_is_asked_exists() -> None:
    """What running_engine.py asks the scheduler exists in this version."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.interface import SchedulerInterface
    from vllm.v1.core.sched.scheduler import Scheduler

    assert callable(BlockPool.get_num_free_blocks)
    assert "block_pool" in KVCacheManager.__init__.__code__.co_names
    assert "kv_cache_manager" in Scheduler.__init__.__code__.co_names
    assert callable(SchedulerInterface.has_unfinished_requests)


def _waits_for_messages_are_gentle() -> None:
    """A reader that vLLM would let spin sleeps, and looks after transfers."""
    import zmq
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    from services.worker.engine_waits import wait_gently

    gently, polls = False, 0

    def poll() -> bool:
        nonlocal polls
        polls += 1
        return polls < 4

    wait_gently(lambda: gently, poll)
    with zmq.Context() as context:
        writer = SpinCondition(is_reader=False, context=context, notify_address="inproc://queue")
        reader = SpinCondition(is_reader=True, context=context, notify_address="inproc://queue")
        reader.busy_loop_s = 3600
        reader.record_read()
        begun = time.monotonic()
        reader.wait(timeout_ms=_LONG_MILLISECONDS)
        assert (polls, time.monotonic() - begun < _SHORT_SECONDS) == (0, True), "it spins"
        gently = True
        time.sleep(0.005)
        for expected in (1, 2, 3):
            reader.wait(timeout_ms=_LONG_MILLISECONDS)
            assert polls == expected
        writer.notify()
        reader.wait(timeout_ms=None)
        assert polls == 4
        assert time.monotonic() - begun < _SHORT_SECONDS
        for condition in (writer, reader):
            for name in ("local_notify_socket", "read_cancel_socket", "write_cancel_socket"):
                if getattr(condition, name) is not None:
                    getattr(condition, name).close(linger=0)


if __name__ == "__main__":
    main()
