"""The parts of the status page as JSON. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from kvloop.common.v1 import common_pb2
from kvloop.kvmeta.v1 import ledger_pb2, registry_pb2
from services.router.candidates import Candidate
from services.router.status.entry import TurnEntry
from services.router.status.fleet import Conversations
from services.router.status.journal import Figures

Json = dict[str, Any]


def workers(
    registered: Iterable[registry_pb2.WorkerEntry], seen: Mapping[str, Candidate]
) -> list[Json]:
    """Live workers with what they retain and how this router finds them.

    Args:
        registered: as the registry lists them.
        seen: this router's own view, by worker id.
    """
    return [_worker(entry, seen.get(entry.worker.worker_id)) for entry in registered]


def seen_only(seen: Mapping[str, Candidate]) -> list[Json]:
    """The workers that this router knows, while the registry does not answer.

    What they retain is null then: nobody says.
    """
    entries = (registry_pb2.WorkerEntry(worker=candidate.worker) for candidate in seen.values())
    unknown: Json = {"retained_conversations": None, "retained_blocks": None}
    return [_worker(entry, seen[entry.worker.worker_id]) | unknown for entry in entries]


def conversations(found: Conversations) -> Json:
    """A tenant's conversations."""
    return {"shown": [_conversation(one) for one in found.shown], "more": found.more}


def turns(entries: Iterable[TurnEntry]) -> list[Json]:
    """Turns, without the tenant that they are shown to."""
    return [_turn(entry) for entry in entries]


def figures(series: Iterable[Figures]) -> list[Json]:
    """Figures over time."""
    return [asdict(one) for one in series]


def _worker(entry: registry_pb2.WorkerEntry, candidate: Candidate | None) -> Json:
    worker, traits = entry.worker, entry.worker.traits
    return {
        "worker_id": worker.worker_id,
        "role": common_pb2.WorkerRole.Name(worker.role).removeprefix("WORKER_ROLE_").lower(),
        "model": worker.model,
        "address": worker.address,
        "state": _state(worker, candidate),
        "in_flight": candidate.in_flight if candidate else 0,
        "vllm_version": traits.vllm_version,
        "block_size": traits.block_size,
        "kv_blocks": traits.num_kv_blocks,
        "retained_conversations": entry.retained_conversations,
        "retained_blocks": entry.retained_blocks,
        "lease_renewal": traits.lease_renewal,
    }


def _state(worker: registry_pb2.Worker, candidate: Candidate | None) -> str:
    # A worker that refuses this router's legs drains, before the registry says so.
    refuses = candidate is not None and not candidate.takes_turns
    if refuses or worker.state == registry_pb2.Worker.STATE_DRAINING:
        return "draining"
    if candidate is None:
        return "unknown to this router"
    return "active" if candidate.reachable else "unreachable"


def _conversation(one: ledger_pb2.Conversation) -> Json:
    return {
        "model": one.key.model,
        "conversation_id": one.key.conversation_id,
        "state": ledger_pb2.Conversation.State.Name(one.state).removeprefix("STATE_").lower(),
        "turn": one.turn,
        "worker_id": one.worker_id,
        "tokens": one.num_tokens,
        "blocks": one.num_blocks,
        "committed": one.commit_time.ToMilliseconds() / 1000,
        "remaining": one.remaining_ttl.ToMilliseconds() / 1000,
    }


def _turn(entry: TurnEntry) -> Json:
    shown = asdict(entry)
    del shown["tenant"]
    return shown
