"""Drives leases, renewals and releases against one version of vLLM's sources.

Run in a process of its own, with that version first on PYTHONPATH; prints "ok".
Both halves of NixlConnector are the version's own; see ranks.py for what is not.
"""

from __future__ import annotations

import socket
import sys
import types
from typing import Any

from tests.versions.ranks import IN_FLIGHT, Engine, SetClock
from tests.versions.stand_ins import (
    BLOCK,
    TTL,
    Blocks,
    Events,
    make_request,
    sidecar_socket,
    stand_in_for_gguf,
    until,
)

LEASE = 60.0


def main() -> None:
    """Play every way in which retained blocks can be kept and lost."""
    stand_in_for_gguf()
    clock = SetClock()
    with sidecar_socket() as listener:
        engine = Engine()
        sidecar = Sidecar(engine, Events(listener))
        hello = sidecar.events.next()
        assert sidecar.events.next() == {"type": "pins", "pins": []}
        _expires(engine, sidecar, clock, LEASE if hello["lease_renewal"] else TTL)
        _is_read(engine, sidecar)
        _is_released(engine, sidecar)
        _is_released_out_of_order(engine, sidecar, clock)
        _running_requests_are_not_released(engine, sidecar)
        if hello["lease_renewal"]:
            _is_renewed(engine, sidecar, clock)
            _is_renewed_up_to_the_ttl(engine, sidecar, clock)
            _a_late_renewal_is_not_confirmed(engine, sidecar, clock)
            _one_rank_may_drop_before_the_other(engine, sidecar, clock)
            _a_released_pin_is_not_renewed(engine, sidecar)
            _a_reader_sees_the_renewed_deadline(engine, clock)
        else:
            _renewals_are_ignored(engine, sidecar, clock)
        _a_new_sidecar_gets_a_snapshot(engine, sidecar, clock, listener)
        engine.connector.shutdown()
    sys.stdout.write("ok\n")


class Sidecar:
    """Ends turns, and asks for renewals and releases, as the sidecar does."""

    def __init__(self, engine: Engine, events: Events) -> None:
        self.events = events
        self._engine = engine

    def end_turn(self) -> dict[str, Any]:
        """A decode leg that ran here and is retained; returns its handle."""
        prompt = list(range(3 * BLOCK))
        request = make_request(prompt, {"kvloop_turn_id": "turn"}, output=[1, 2, 3])
        connector = self._engine.connector
        connector.update_state_after_alloc(request, Blocks(4), 0)
        self._engine.step()
        delay_free, handle = connector.request_finished_all_groups(request, (list(range(4)),))
        assert delay_free
        assert self.events.next()["params"]["remote_request_id"] == request.request_id
        self._engine.step()
        return dict(handle)

    def ask(self, message: dict[str, Any]) -> None:
        """Send a line and wait until the engine's next step will see it."""
        asked = self._engine.connector._events
        before = len(asked._releases) + len(asked._renewals)
        self.events.send(message)
        until(lambda: len(asked._releases) + len(asked._renewals) > before, "it has arrived")

    def renew(self, request_id: str, seconds: float) -> None:
        self.ask({"type": "renew", "pins": [[request_id, seconds], ["unknown", seconds]]})

    def release(self, *request_ids: str) -> None:
        self.ask({"type": "release", "request_ids": list(request_ids)})

    def expect_freed(self, *request_ids: str) -> None:
        assert self.events.next() == {"type": "freed", "request_ids": list(request_ids)}

    def expect_nothing(self) -> None:
        self.events.expect_nothing_from(self._engine.connector)


def _expires(engine: Engine, sidecar: Sidecar, clock: SetClock, seconds: float) -> None:
    handle = sidecar.end_turn()
    request_id = handle["remote_request_id"]
    if "remote_blocks_expiry_time" in handle:
        assert handle["remote_blocks_expiry_time"] == clock.now + seconds
    clock.advance(seconds - 0.1)
    assert not engine.step(3)
    clock.advance(0.2)
    assert engine.step() == {request_id}
    sidecar.expect_freed(request_id)
    assert not any(rank.worker._reqs_to_process for rank in engine.ranks)


def _is_read(engine: Engine, sidecar: Sidecar) -> None:
    """Blocks are free once every rank has been read."""
    request_id = sidecar.end_turn()["remote_request_id"]
    for number, rank in enumerate(engine.ranks):
        rank.notifications.append(f"{request_id}:1".encode())
        last = number == len(engine.ranks) - 1
        assert engine.step() == ({request_id} if last else set())
    sidecar.expect_freed(request_id)


def _is_released(engine: Engine, sidecar: Sidecar) -> None:
    """On every rank, once; what is unknown or gone does no harm."""
    request_id = sidecar.end_turn()["remote_request_id"]
    sidecar.release(request_id, "unknown", request_id)
    assert engine.step() == {request_id}
    sidecar.expect_freed(request_id)
    sidecar.release(request_id)
    assert not engine.step(3)
    assert not any(rank.worker._reqs_to_send for rank in engine.ranks)


def _is_released_out_of_order(engine: Engine, sidecar: Sidecar, clock: SetClock) -> None:
    """A release does not wait for turns that ended before."""
    older = sidecar.end_turn()["remote_request_id"]
    clock.advance(1)
    newer = sidecar.end_turn()["remote_request_id"]
    sidecar.release(newer)
    assert engine.step() == {newer}
    sidecar.release(older)
    assert engine.step() == {older}
    sidecar.expect_freed(newer)
    sidecar.expect_freed(older)


def _running_requests_are_not_released(engine: Engine, sidecar: Sidecar) -> None:
    request = make_request([1] * BLOCK, {"kvloop_turn_id": "running"})
    engine.connector.update_state_after_alloc(request, Blocks(1), 0)
    engine.step()
    sidecar.release(request.request_id)
    assert not engine.step(3)
    assert all(request.request_id in rank.worker._reqs_to_process for rank in engine.ranks)
    engine.connector.connector_scheduler._reqs_not_processed.add(request.request_id)
    engine.step()


def _is_renewed(engine: Engine, sidecar: Sidecar, clock: SetClock) -> None:
    """A renewal counts once the steps that began before it are over."""
    handle = sidecar.end_turn()
    request_id = handle["remote_request_id"]
    clock.advance(50)
    sidecar.renew(request_id, LEASE)
    engine.step(IN_FLIGHT)
    sidecar.expect_nothing()
    engine.step()
    assert sidecar.events.next() == {
        "type": "renewed",
        "pins": [{"request_id": request_id, "remaining_seconds": LEASE, "extension_seconds": 50.0}],
    }
    # A shorter lease does not take anything back.
    sidecar.renew(request_id, 5)
    engine.step(3)
    assert sidecar.events.next()["pins"][0]["remaining_seconds"] == LEASE
    clock.advance(59)
    assert not engine.step(3)
    clock.advance(1)
    assert engine.step() == {request_id}
    sidecar.expect_freed(request_id)


def _is_renewed_up_to_the_ttl(engine: Engine, sidecar: Sidecar, clock: SetClock) -> None:
    request_id = sidecar.end_turn()["remote_request_id"]
    sidecar.renew(request_id, 10 * TTL)
    engine.step(3)
    assert sidecar.events.next()["pins"][0]["remaining_seconds"] == TTL
    clock.advance(TTL)
    assert engine.step() == {request_id}
    sidecar.expect_freed(request_id)


def _a_late_renewal_is_not_confirmed(engine: Engine, sidecar: Sidecar, clock: SetClock) -> None:
    """The deadline passes in a step that is still running when the renewal goes out."""
    request_id = sidecar.end_turn()["remote_request_id"]
    clock.advance(LEASE - 2.5)
    engine.schedule()
    sidecar.renew(request_id, LEASE)
    engine.schedule()
    clock.advance(3)
    assert engine.execute() == {request_id}
    assert not engine.execute()
    engine.step(5)
    sidecar.expect_freed(request_id)
    assert not any(rank.worker._reqs_to_send for rank in engine.ranks), "it came back"
    # One that is due anyway is not even tried.
    late = sidecar.end_turn()["remote_request_id"]
    clock.advance(LEASE - 1.5)
    sidecar.renew(late, LEASE)
    assert not engine.step(5)
    clock.advance(1.5)
    assert engine.step() == {late}
    sidecar.expect_freed(late)
    sidecar.expect_nothing()


def _one_rank_may_drop_before_the_other(engine: Engine, sidecar: Sidecar, clock: SetClock) -> None:
    """Blocks are the scheduler's until the last rank drops them: the renewal holds."""
    request_id = sidecar.end_turn()["remote_request_id"]
    clock.advance(LEASE - 2.5)
    engine.schedule()
    sidecar.renew(request_id, LEASE)
    engine.schedule()
    assert not engine.execute({1: lambda: clock.advance(3)})
    assert [len(rank.worker._reqs_to_send) for rank in engine.ranks] == [1, 0]
    assert not engine.execute()
    assert not engine.step(IN_FLIGHT)
    assert sidecar.events.next()["pins"][0]["request_id"] == request_id
    sidecar.release(request_id)
    assert engine.step() == {request_id}
    sidecar.expect_freed(request_id)


def _a_released_pin_is_not_renewed(engine: Engine, sidecar: Sidecar) -> None:
    request_id = sidecar.end_turn()["remote_request_id"]
    engine.schedule()
    sidecar.release(request_id)
    sidecar.renew(request_id, LEASE)
    engine.schedule()
    assert not engine.execute()
    sidecar.renew(request_id, LEASE)
    engine.schedule()
    assert engine.execute() == {request_id}
    engine.execute()
    engine.step(5)
    sidecar.expect_freed(request_id)
    sidecar.expect_nothing()


def _a_reader_sees_the_renewed_deadline(engine: Engine, clock: SetClock) -> None:
    """vLLM's own check, on a prefill rank whose clock is 500 s behind."""
    worker = engine.ranks[0].worker
    worker._engine_clock_offset = {"engine-d": 500.0}
    remote = types.SimpleNamespace(engine_id="engine-d", blocks_expiry_time=clock.now + 8)
    meta = types.SimpleNamespace(remote=remote, local_physical_block_ids=[[1]])
    clock.advance(-500)
    assert not worker._is_turn2_read_expired(meta)
    clock.advance(4)
    assert worker._is_turn2_read_expired(meta)
    remote.blocks_expiry_time += 50.0
    assert not worker._is_turn2_read_expired(meta)
    clock.advance(496)


def _renewals_are_ignored(engine: Engine, sidecar: Sidecar, clock: SetClock) -> None:
    """A reader would not see the deadline, so it stays where it is."""
    request_id = sidecar.end_turn()["remote_request_id"]
    clock.advance(TTL - 10)
    sidecar.renew(request_id, TTL)
    engine.step(5)
    clock.advance(10)
    assert engine.step() == {request_id}
    sidecar.expect_freed(request_id)


def _a_new_sidecar_gets_a_snapshot(
    engine: Engine, sidecar: Sidecar, clock: SetClock, listener: socket.socket
) -> None:
    handle = sidecar.end_turn()
    clock.advance(7)
    sidecar.events.close()
    events = Events(listener)
    assert events.next()["type"] == "hello"
    (pin,) = events.next()["pins"]
    assert pin["request_id"] == handle["remote_request_id"]
    assert (pin["turn_id"], pin["num_tokens"], pin["num_blocks"]) == ("turn", 3 * BLOCK + 2, 4)
    assert (round(pin["age_seconds"], 6), pin["extension_seconds"]) == (7, 0)
    assert round(pin["remaining_seconds"], 6) in (LEASE - 7, TTL - 7)


if __name__ == "__main__":
    main()
