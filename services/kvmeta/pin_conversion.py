"""Between the messages about pins and the values of model.py; see conversion.py."""

from __future__ import annotations

from collections.abc import Iterable

from kvloop.kvmeta.v1 import ledger_pb2
from services.kvmeta import bounds
from services.kvmeta.conversion import conversation_to_proto, duration, key_to_proto
from services.kvmeta.model import HeldPin, PinStatus, PinVerdict, RetainedPin
from services.kvmeta.store import PinFilter

_VERDICTS = {
    verdict: ledger_pb2.PinStatus.Verdict.Value(f"VERDICT_{verdict.value}")
    for verdict in PinVerdict
}


def held_pins_from_proto(messages: Iterable[ledger_pb2.HeldPin]) -> list[HeldPin]:
    """What an engine holds. Their number is checked before."""
    return [_held_pin(message, f"pins[{index}]") for index, message in enumerate(messages)]


def _held_pin(message: ledger_pb2.HeldPin, field: str) -> HeldPin:
    return HeldPin(
        turn_id=bounds.text(message.turn_id, f"{field}.turn_id", most=bounds.MAX_REQUEST_ID),
        engine_remaining_us=bounds.duration_us(
            message.engine_remaining, f"{field}.engine_remaining", zero_allowed=True
        ),
        deadline_extension_us=bounds.duration_us(
            message.deadline_extension, f"{field}.deadline_extension", zero_allowed=True
        ),
    )


def turn_ids_from_proto(values: Iterable[str]) -> list[str]:
    """Turns whose handles shall be evicted, each once."""
    checked = (
        bounds.text(value, f"turn_ids[{index}]", most=bounds.MAX_REQUEST_ID)
        for index, value in enumerate(values)
    )
    return list(dict.fromkeys(checked))


def pin_filter_from_proto(message: ledger_pb2.ListPinsRequest) -> PinFilter:
    """Which pins to list; an empty string keeps all."""
    return PinFilter(
        worker_id=bounds.optional_text(message.worker_id, "worker_id", most=bounds.MAX_WORKER_ID)
        or None,
        tenant=bounds.optional_text(message.tenant, "tenant", most=bounds.MAX_TENANT) or None,
        model=bounds.optional_text(message.model, "model", most=bounds.MAX_MODEL) or None,
    )


def pin_status_to_proto(status: PinStatus) -> ledger_pb2.PinStatus:
    """The answer for one pin."""
    message = ledger_pb2.PinStatus(turn_id=status.turn_id, verdict=_VERDICTS[status.verdict])
    if status.key is not None:
        message.key.CopyFrom(key_to_proto(status.key))
        message.age.CopyFrom(duration(status.age_us))
        message.num_tokens = status.num_tokens
    if status.verdict is PinVerdict.WANTED:
        message.wanted_for.CopyFrom(duration(status.wanted_for_us))
    return message


def pin_to_proto(pin: RetainedPin, now_us: int, until_us: int) -> ledger_pb2.Pin:
    """Retained KV as it is now, whose handle is given out until then."""
    row = pin.conversation
    return ledger_pb2.Pin(
        conversation=conversation_to_proto(row, now_us, until_us),
        age=duration(max(0, now_us - row.commit_time_us)),
        engine_remaining=duration(max(0, row.drop_time_us - now_us)),
        num_bytes=row.num_blocks * pin.kv_block_bytes,
    )
