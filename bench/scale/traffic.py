"""What turns, workers and retained conversations cost the ledger and the registry."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from bench.scale.counting import CountedKvmeta, Traffic, VirtualClock
from bench.scale.fleet import DECODE, MODEL, make_fleet
from kvloop.common.v1 import common_pb2
from kvloop.durations import to_duration
from kvloop.kvmeta.v1 import ledger_pb2, registry_pb2

LEASE_SECONDS = 15.0
"""Of workers; renewed at a third."""
PIN_LEASE_SECONDS = 60.0
"""Of retained KV; renewed at a third, with two calls."""
PARAMS_BYTES = 1000
"""Transfer params of a turn."""
ROUTERS = 4
_TURNS = 2
_MAX_PINS = 10_000
_DECODE_SHARE = 0.6


@dataclass
class Counted:
    """What was counted for so many workers and conversations."""

    workers: int
    conversations: int
    turns: Traffic = field(default_factory=Traffic)
    turn_seconds: float = 0.0
    """CPU time of the ledger for all turns."""
    joining: Traffic = field(default_factory=Traffic)
    """Registrations, and what routers get when they start."""
    leases: Traffic = field(default_factory=Traffic)
    """Worker leases, per minute."""
    pins: Traffic = field(default_factory=Traffic)
    """Leases of retained KV, per minute."""
    pin_seconds: float = 0.0
    """CPU time of the ledger for them, per minute."""

    @property
    def turn_count(self) -> int:
        """Turns that were run."""
        return self.conversations * _TURNS


async def count(workers: int, conversations: int) -> Counted:
    """Run two turns of every conversation, then a minute of renewals."""
    clock, counted = VirtualClock(), Counted(workers, conversations)
    kvmeta = CountedKvmeta(clock, conversations)
    decode = round(workers * _DECODE_SHARE)
    fleet = make_fleet(workers - decode, decode)
    leases = []
    for worker in fleet:
        request = registry_pb2.RegisterWorkerRequest(worker=worker, ttl=to_duration(LEASE_SECONDS))
        leases.append(await kvmeta.register(request, counted.joining))
    for _ in range(ROUTERS):
        await kvmeta.first_state(counted.joining)

    holders = [worker for worker in fleet if worker.role == DECODE]
    started = time.process_time()
    for turn in range(_TURNS):
        for number in range(conversations):
            await _turn(kvmeta, number, turn, holders[number % decode], counted.turns)
    counted.turn_seconds = time.process_time() - started

    for _ in range(round(60 / (LEASE_SECONDS / 3))):
        await kvmeta.keep_alive(leases, counted.leases)
    started = time.process_time()
    for _ in range(round(60 / (PIN_LEASE_SECONDS / 3)) * 2):
        for place, holder in enumerate(holders):
            numbers = range(place, conversations, decode)
            await _renew(kvmeta, holder, numbers, counted.pins)
    counted.pin_seconds = time.process_time() - started
    return counted


async def _turn(
    kvmeta: CountedKvmeta, number: int, turn: int, holder: registry_pb2.Worker, traffic: Traffic
) -> None:
    key = common_pb2.ConversationKey(
        tenant="default", model=MODEL, conversation_id=f"conversation-{number}"
    )
    request_id = _request_id(number, turn)
    opened = await kvmeta.take(
        ledger_pb2.TakeHandleRequest(key=key, request_id=request_id), traffic
    )
    assert opened.HasField("handle") == (turn > 0), "the second turn has the first one's handle"
    commit = ledger_pb2.CommitTurnRequest(
        key=key,
        request_id=request_id,
        turn=opened.turn,
        worker_id=holder.worker_id,
        engine=holder.engine,
        transfer_params_json=b"p" * PARAMS_BYTES,
        engine_ttl=to_duration(PIN_LEASE_SECONDS),
        retention_ttl=to_duration(480),
        num_tokens=4000,
        num_blocks=250,
    )
    await kvmeta.commit(commit, traffic)


async def _renew(
    kvmeta: CountedKvmeta, holder: registry_pb2.Worker, numbers: range, traffic: Traffic
) -> None:
    for part in range(math.ceil(len(numbers) / _MAX_PINS)):
        pins = [
            ledger_pb2.HeldPin(
                turn_id=_request_id(number, _TURNS - 1),
                engine_remaining=to_duration(40),
                deadline_extension=to_duration(20),
            )
            for number in numbers[part * _MAX_PINS : (part + 1) * _MAX_PINS]
        ]
        request = ledger_pb2.RenewPinsRequest(
            worker_id=holder.worker_id, engine=holder.engine, pins=pins
        )
        await kvmeta.renew_pins(request, traffic)


def _request_id(number: int, turn: int) -> str:
    return f"{number:024x}{turn:08x}"
