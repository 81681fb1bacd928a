"""The port to the ledger about pins: what is still wanted, and what may give way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol, TypeVar

import grpc

from kvloop import rpc
from kvloop.common.v1 import common_pb2
from kvloop.durations import to_duration, to_seconds
from kvloop.kvmeta.v1 import ledger_pb2, ledger_pb2_grpc
from services.worker.event_messages import EngineRef

_T = TypeVar("_T")
_CALL_SECONDS = 5.0
_MAX_AUDITED = 10_000
_MAX_EVICTED = 1000


class Verdict(Enum):
    """What shall become of a pin; see kvloop.kvmeta.v1.PinStatus.Verdict."""

    WANTED = auto()
    IN_USE = auto()
    RELEASE = auto()
    UNOWNED = auto()


@dataclass(frozen=True)
class PinReport:
    """A pin as its engine holds it."""

    turn_id: str
    remaining_seconds: float
    """Until the engine drops the blocks by itself."""
    extension_seconds: float
    """By how much the engine has moved the deadline since the turn ended."""


@dataclass(frozen=True)
class PinVerdict:
    """The ledger's answer for one pin."""

    turn_id: str
    verdict: Verdict
    wanted_seconds: float = 0.0
    """How much longer its conversation wants it, if it does."""
    tenant: str = ""
    """Whose it is; empty if it is unowned."""


class PinLedger(Protocol):
    """What the ledger knows of one worker's pins.

    All calls raise:
        PreconditionError: ENGINE_GONE, the worker's lease or engine is gone.
        UnavailableError, DeadlineError: the ledger cannot be reached.
    """

    async def audit(self, engine: EngineRef, pins: Sequence[PinReport]) -> Sequence[PinVerdict]:
        """Tell what the engine retains and until when, and ask which is wanted.

        From then on the ledger gives handles out for as long as was told.

        Returns:
            A verdict for each pin, in any order.
        """

    async def evict(self, engine: EngineRef, turn_ids: Sequence[str]) -> Sequence[str]:
        """Take handles back to free their blocks.

        Returns:
            Those that nobody has or will be given any more; only they may be freed.
        """


class GrpcPinLedger:
    """The ledger over gRPC.

    Args:
        channel: to kvmeta; not closed here.
        worker_id: this worker's name in the registry.
    """

    def __init__(self, channel: grpc.aio.Channel, worker_id: str) -> None:
        self._stub = ledger_pb2_grpc.LedgerServiceStub(channel)
        self._worker_id = worker_id

    async def audit(self, engine: EngineRef, pins: Sequence[PinReport]) -> Sequence[PinVerdict]:
        """See `PinLedger.audit`."""
        verdicts: list[PinVerdict] = []
        for batch in _batches(pins, _MAX_AUDITED):
            request = ledger_pb2.RenewPinsRequest(
                worker_id=self._worker_id,
                engine=_engine(engine),
                pins=[
                    ledger_pb2.HeldPin(
                        turn_id=pin.turn_id,
                        engine_remaining=to_duration(pin.remaining_seconds),
                        deadline_extension=to_duration(pin.extension_seconds),
                    )
                    for pin in batch
                ],
            )
            with rpc.typed_errors():
                reply = await self._stub.RenewPins(request, timeout=_CALL_SECONDS)
            verdicts += [
                PinVerdict(
                    status.turn_id,
                    _verdict(status.verdict),
                    wanted_seconds=to_seconds(status.wanted_for),
                    tenant=status.key.tenant,
                )
                for status in reply.pins
            ]
        return verdicts

    async def evict(self, engine: EngineRef, turn_ids: Sequence[str]) -> Sequence[str]:
        """See `PinLedger.evict`."""
        evicted: list[str] = []
        for batch in _batches(turn_ids, _MAX_EVICTED):
            request = ledger_pb2.EvictHandlesRequest(
                worker_id=self._worker_id, engine=_engine(engine), turn_ids=batch
            )
            with rpc.typed_errors():
                reply = await self._stub.EvictHandles(request, timeout=_CALL_SECONDS)
            evicted += reply.evicted_turn_ids
        return evicted


def _batches(items: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _engine(engine: EngineRef) -> common_pb2.EngineRef:
    return common_pb2.EngineRef(engine_id=engine.engine_id, epoch=engine.epoch)


def _verdict(value: ledger_pb2.PinStatus.Verdict.ValueType) -> Verdict:
    known = {
        ledger_pb2.PinStatus.VERDICT_WANTED: Verdict.WANTED,
        ledger_pb2.PinStatus.VERDICT_RELEASE: Verdict.RELEASE,
        ledger_pb2.PinStatus.VERDICT_UNOWNED: Verdict.UNOWNED,
    }
    # A verdict of a newer ledger is treated like one that asks for nothing.
    return known.get(value, Verdict.IN_USE)
