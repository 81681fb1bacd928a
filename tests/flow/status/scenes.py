"""A status page with whatever it shall show, and nothing behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from starlette.applications import Starlette

from kvloop.common.v1 import common_pb2
from kvloop.errors import UnauthenticatedError, UnavailableError
from kvloop.kvmeta.v1 import ledger_pb2, registry_pb2
from services.router.candidates import Candidate
from services.router.gateway import server
from services.router.identity import Caller
from services.router.status.entry import TurnEntry
from services.router.status.feed import StatusFeed
from services.router.status.fleet import Conversations
from services.router.status.journal import TurnJournal
from services.router.status.pages import StatusPages

NOW = 1_800_000_000.0
KEY = "a-key"


@dataclass
class FakeFleet:
    """kvmeta that says what it is told. See `Fleet`."""

    entries: list[registry_pb2.WorkerEntry] = field(default_factory=list)
    rows: dict[str, list[ledger_pb2.Conversation]] = field(default_factory=dict)
    away: bool = False

    async def workers(self) -> Sequence[registry_pb2.WorkerEntry]:
        """See `Fleet.workers`."""
        if self.away:
            raise UnavailableError("kvmeta is away", reason="LEDGER_UNAVAILABLE")
        return self.entries

    async def conversations(self, tenant: str, limit: int) -> Conversations:
        """See `Fleet.conversations`."""
        rows = self.rows.get(tenant, [])
        return Conversations(rows[:limit], len(rows) > limit)


@dataclass
class Scene:
    """The page and what it shows."""

    url: str
    fleet: FakeFleet
    journal: TurnJournal


@asynccontextmanager
async def scene(
    *, keys: dict[str, str] | None = None, max_viewers: int = 50
) -> AsyncIterator[Scene]:
    """Serve a page.

    Args:
        keys: tenant of each API key; none are needed if omitted.
        max_viewers: open feeds at most.
    """
    fleet, journal = FakeFleet(), TurnJournal(lambda: NOW)

    def caller(authorization: str | None) -> Caller:
        if keys is None:
            return Caller()
        tenant = keys.get((authorization or "").removeprefix("Bearer "))
        if tenant is None:
            raise UnauthenticatedError("the API key is not valid", reason="API_KEY_INVALID")
        return Caller(tenant)

    def seen() -> dict[str, Candidate]:
        return {e.worker.worker_id: Candidate(e.worker, in_flight=1) for e in fleet.entries}

    feed = StatusFeed(fleet, journal, seen, interval_seconds=0.1)
    app = Starlette(routes=StatusPages(caller, feed, max_viewers=max_viewers).routes())
    async with AsyncExitStack() as stack:
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        port = await stack.enter_async_context(
            server.serve(app, "127.0.0.1:0", tasks, grace_seconds=1, head_timeout_seconds=10)
        )
        yield Scene(f"http://127.0.0.1:{port}/ui/", fleet, journal)


def worker(role: str, number: int) -> registry_pb2.WorkerEntry:
    """A live worker."""
    traits = registry_pb2.EngineTraits(vllm_version="0.32.0", block_size=32, num_kv_blocks=4000)
    return registry_pb2.WorkerEntry(
        worker=registry_pb2.Worker(
            worker_id=f"{role}-{number}",
            role=common_pb2.WorkerRole.Value(f"WORKER_ROLE_{role.upper()}"),
            address=f"10.0.0.{number}:7300",
            model="qwen3-32b",
            traits=traits,
            state=registry_pb2.Worker.STATE_ACTIVE,
        ),
        retained_conversations=7 if role == "decode" else 0,
        retained_blocks=900 if role == "decode" else 0,
    )


def conversation(number: int) -> ledger_pb2.Conversation:
    """A conversation that waits for its next turn."""
    return ledger_pb2.Conversation(
        key=common_pb2.ConversationKey(
            tenant="default", model="qwen3-32b", conversation_id=f"agent-{number:04d}/<b>&\"'"
        ),
        state=ledger_pb2.Conversation.STATE_AVAILABLE
        if number % 3
        else ledger_pb2.Conversation.STATE_TAKEN,
        turn=number % 9 + 1,
        worker_id=f"decode-{number % 2}",
        num_tokens=1000 + number * 37,
        num_blocks=32 + number,
        commit_time=Timestamp(seconds=int(NOW) - number),
        remaining_ttl=Duration(seconds=max(480 - number, 5)),
    )


def turn(number: int, *, tenant: str = "default", **more: object) -> TurnEntry:
    """A turn that pulled most of its prompt."""
    values: dict[str, object] = {
        "turn_id": f"{number:032x}",
        "tenant": tenant,
        "model": "qwen3-32b",
        "conversation_id": f"agent-{number:04d}",
        "number": number % 9 + 1,
        "started": NOW - 1.4,
        "outcome": "answered",
        "error": "",
        "prefill_worker_id": "prefill-0",
        "decode_worker_id": "decode-0",
        "handle_hit": True,
        "is_followup": True,
        "miss_reason": "",
        "prompt_tokens": 24_000,
        "completion_tokens": 64,
        "proven": 23_400,
        "pulled": 20_000,
        "cached": 3_400,
        "recomputed": 600,
        "retained": 24_064,
        "prefill_start": 0.004,
        "prefill_seconds": 0.18,
        "pull_seconds": 0.05,
        "decode_start": 0.185,
        "ttft": 0.21 + number / 1000,
        "total_seconds": 1.4,
    }
    return TurnEntry(**{**values, **more})  # type: ignore[arg-type]
