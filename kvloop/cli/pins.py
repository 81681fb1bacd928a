"""`kvloop pins`: what decode workers retain, and for whom."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from kvloop.cli import options
from kvloop.cli.tables import Json, OfModel, print_json, print_table, state_word
from kvloop.cli.tls import tls_of
from kvloop.common.v1 import common_pb2
from kvloop.durations import to_seconds
from kvloop.errors import KvloopError
from kvloop.inventory import DEFAULT_KVMETA, list_pins, list_workers, read_worker_info
from kvloop.kvmeta.v1 import ledger_pb2, registry_pb2
from kvloop.tls import TlsSource
from kvloop.worker.v1 import worker_pb2

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")

Info = worker_pb2.GetWorkerInfoResponse | KvloopError
"""What a worker says of itself, or why it does not."""


def pins(
    context: typer.Context,
    worker: Annotated[str, typer.Option(help="Keep one worker's only.")] = "",
    tenant: Annotated[str, typer.Option(help="Keep one tenant's only.")] = "",
    model: OfModel = "",
    as_json: Json = False,
    kvmeta: options.Kvmeta = DEFAULT_KVMETA,
) -> None:
    """List retained KV: which worker keeps how much for which conversation, until when.

    States: available (the next turn can have it), taken (a turn is reading it).
    "wanted" is how much longer its conversation can have it, "lease" how soon the
    engine drops it unless it is renewed. Below, each decode worker with all that its
    engine retains; orphans are what no conversation owns: 0 at rest.

    \b
    Examples:
      kvloop pins
      kvloop pins --worker decode-0 --tenant acme
      kvloop pins --json | jq 'select(.conversation).conversation.key'
    """
    tls = tls_of(context)
    found = list(list_pins(kvmeta, worker_id=worker, tenant=tenant, model=model, tls=tls))
    workers = [
        entry.worker
        for entry in list_workers(kvmeta, model=model, tls=tls)
        if entry.worker.role == common_pb2.WORKER_ROLE_DECODE
        and worker in ("", entry.worker.worker_id)
    ]
    infos = [(one, _ask(one, tls)) for one in workers]
    if as_json:
        print_json(found)
        _print_infos(infos)
        return
    print_table(
        [
            "worker",
            "tenant",
            "model",
            "conversation",
            "state",
            "tokens",
            "blocks",
            "memory",
            "age",
            "wanted",
            "lease",
        ],
        [_pin_row(pin) for pin in found],
        empty="nothing is retained",
    )
    print_table(
        ["worker", "pins", "blocks", "memory", "share", "orphans"],
        [_worker_row(one, info) for one, info in infos],
        empty="no decode workers",
    )


def _ask(worker: registry_pb2.Worker, tls: TlsSource | None) -> Info:
    try:
        return read_worker_info(worker.address, tls=tls)
    except KvloopError as error:
        return error


def _pin_row(pin: ledger_pb2.Pin) -> list[str]:
    conversation = pin.conversation
    available = conversation.state == ledger_pb2.Conversation.STATE_AVAILABLE
    return [
        conversation.worker_id,
        conversation.key.tenant,
        conversation.key.model,
        conversation.key.conversation_id,
        state_word(ledger_pb2.Conversation.State.Name, conversation.state),
        f"{conversation.num_tokens:,}",
        f"{conversation.num_blocks:,}",
        memory(pin.num_bytes),
        _seconds(to_seconds(pin.age)),
        _seconds(to_seconds(conversation.remaining_ttl)) if available else "-",
        _seconds(to_seconds(pin.engine_remaining)),
    ]


def _worker_row(worker: registry_pb2.Worker, info: Info) -> list[str]:
    if isinstance(info, KvloopError):
        return [worker.worker_id, "-", "-", "-", "-", f"unknown: {info.message}"]
    traits = worker.traits
    share = info.retained_blocks / traits.num_kv_blocks if traits.num_kv_blocks else 0.0
    return [
        worker.worker_id,
        f"{info.retained_pins:,}",
        f"{info.retained_blocks:,}",
        memory(info.retained_blocks * traits.kv_block_bytes),
        f"{share:.0%}",
        f"{info.orphan_pins:,}",
    ]


def _print_infos(infos: Sequence[tuple[registry_pb2.Worker, Info]]) -> None:
    for worker, info in infos:
        entry: dict[str, object] = {"worker_id": worker.worker_id}
        if isinstance(info, KvloopError):
            entry["error"] = info.message
        else:
            entry["retained_pins"] = info.retained_pins
            entry["retained_blocks"] = info.retained_blocks
            entry["orphan_pins"] = info.orphan_pins
        sys.stdout.write(json.dumps(entry) + "\n")


def memory(num_bytes: int) -> str:
    """A size for people; - if it is unknown."""
    if not num_bytes:
        return "-"
    size = float(num_bytes)
    for unit in _UNITS[:-1]:
        if size < 1024:
            return f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} {_UNITS[-1]}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s"
