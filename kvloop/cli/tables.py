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
from kvloop.cli.tls import tls_of
from kvloop.common.v1 import common_pb2
from kvloop.durations import to_seconds
from kvloop.inventory import DEFAULT_KVMETA, list_conversations, list_workers
from kvloop.kvmeta.v1 import ledger_pb2, registry_pb2
from kvloop.receipts import enum_name

Json = Annotated[bool, typer.Option("--json", help="One JSON object per line, in full.")]
OfModel = Annotated[str, typer.Option("--model", help="Keep one model's only.")]


def conversations(
    context: typer.Context,
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
    found = list(list_conversations(kvmeta, tenant=tenant, model=model, tls=tls_of(context)))
    if as_json:
        print_json(found)
        return
    print_table(
        ["conversation", "model", "state", "turn", "on", "tokens", "blocks", "left"],
        [
            [
                conversation.key.conversation_id,
                conversation.key.model,
                state_word(ledger_pb2.Conversation.State.Name, conversation.state),
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
    context: typer.Context,
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
    found = list(list_workers(kvmeta, model=model, tls=tls_of(context)))
    if as_json:
        print_json(found)
        return
    print_table(
        ["worker", "role", "state", "model", "address", "vLLM", "block", "lease", "retained"],
        [_worker_row(entry) for entry in found],
        empty="no workers",
    )


def _worker_row(entry: registry_pb2.WorkerEntry) -> list[str]:
    worker, traits = entry.worker, entry.worker.traits
    decodes = worker.role == common_pb2.WORKER_ROLE_DECODE
    share = entry.retained_blocks / traits.num_kv_blocks if traits.num_kv_blocks else 0.0
    retained = (
        f"{entry.retained_conversations:,} conversations, {entry.retained_blocks:,} blocks "
        f"({share:.0%})"
    )
    return [
        worker.worker_id,
        enum_name(common_pb2.WorkerRole.Name, worker.role, "WORKER_ROLE_").lower(),
        state_word(registry_pb2.Worker.State.Name, worker.state),
        worker.model,
        worker.address,
        traits.vllm_version,
        str(traits.block_size),
        *((_lease(traits), retained) if decodes else ("-", "-")),
    ]


def _lease(traits: registry_pb2.EngineTraits) -> str:
    """For how long the engine keeps what it retains, and whether that can be renewed."""
    if traits.lease_renewal:
        return f"{to_seconds(traits.pin_lease):g} s, renewed"
    ttl = to_seconds(traits.decoder_kv_blocks_ttl)
    return f"{ttl:g} s fixed: vLLM {traits.vllm_version} has no renewal"


def state_word(name_of: Callable[[Any], str], number: int) -> str:
    """A state as tables show it."""
    return enum_name(name_of, number, "STATE_").lower()


def print_json(messages: Iterable[Message]) -> None:
    """One JSON object per line, with every field that is set."""
    for message in messages:
        entry = MessageToDict(message, preserving_proto_field_name=True)
        sys.stdout.write(json.dumps(entry) + "\n")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, empty: str) -> None:
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
