"""`kvloop conversations` and `kvloop workers`: what kvmeta knows."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import typer
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvloop.cli import options
from kvloop.common.v1 import common_pb2
from kvloop.durations import to_seconds
from kvloop.inventory import DEFAULT_KVMETA, list_conversations, list_workers
from kvloop.kvmeta.v1 import ledger_pb2, registry_pb2
from kvloop.receipts import enum_name

Json = Annotated[bool, typer.Option("--json", help="One JSON object per line, in full.")]
OfModel = Annotated[str, typer.Option("--model", help="Keep one model's only.")]


def conversations(
    tenant: Annotated[str, typer.Option(help="Whose conversations.")] = "default",
    model: OfModel = "",
    as_json: Json = False,
    kvmeta: options.Kvmeta = DEFAULT_KVMETA,
) -> None:
    """List conversations: who holds their KV, how much, and for how long.

    States: available (the next turn can have it), taken (a turn is under way),
    spent, released, expired, void (its engine is gone).

    \b
    Examples:
      kvloop conversations
      kvloop conversations --json | jq .key
    """
    found = list(list_conversations(kvmeta, tenant=tenant, model=model))
    if as_json:
        _print_json(found)
        return
    _print_table(
        ["conversation", "model", "state", "turn", "on", "tokens", "blocks", "left"],
        [
            [
                conversation.key.conversation_id,
                conversation.key.model,
                _state(ledger_pb2.Conversation.State.Name, conversation.state),
                str(conversation.turn),
                conversation.worker_id,
                f"{conversation.num_tokens:,}",
                f"{conversation.num_blocks:,}",
                f"{to_seconds(conversation.remaining_ttl):.0f} s",
            ]
            for conversation in found
        ],
        empty="no conversations",
    )


def workers(
    model: OfModel = "",
    as_json: Json = False,
    kvmeta: options.Kvmeta = DEFAULT_KVMETA,
) -> None:
    """List live workers: role, engine, and the KV they retain for conversations.

    \b
    Examples:
      kvloop workers
      kvloop workers --json | jq .worker.traits
    """
    found = list(list_workers(kvmeta, model=model))
    if as_json:
        _print_json(found)
        return
    _print_table(
        ["worker", "role", "state", "model", "address", "vLLM", "block", "retained"],
        [_worker_row(entry) for entry in found],
        empty="no workers",
    )


def _worker_row(entry: registry_pb2.WorkerEntry) -> list[str]:
    worker, traits = entry.worker, entry.worker.traits
    share = entry.retained_blocks / traits.num_kv_blocks if traits.num_kv_blocks else 0.0
    retained = (
        f"{entry.retained_conversations:,} conversations, {entry.retained_blocks:,} blocks "
        f"({share:.0%})"
    )
    return [
        worker.worker_id,
        enum_name(common_pb2.WorkerRole.Name, worker.role, "WORKER_ROLE_").lower(),
        _state(registry_pb2.Worker.State.Name, worker.state),
        worker.model,
        worker.address,
        traits.vllm_version,
        str(traits.block_size),
        retained if worker.role == common_pb2.WORKER_ROLE_DECODE else "-",
    ]


def _state(name_of: Callable[[Any], str], number: int) -> str:
    return enum_name(name_of, number, "STATE_").lower()


def _print_json(messages: Iterable[Message]) -> None:
    for message in messages:
        entry = MessageToDict(message, preserving_proto_field_name=True)
        sys.stdout.write(json.dumps(entry) + "\n")


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, empty: str) -> None:
    """A table on a terminal, tab-separated lines in a pipe."""
    console = Console()
    if not console.is_terminal:
        for row in (columns, *rows):
            sys.stdout.write("\t".join(row) + "\n")
        return
    if not rows:
        console.print(empty)
        return
    table = Table(*columns, box=SIMPLE_HEAD)
    for row in rows:
        table.add_row(*row)
    console.print(table)
