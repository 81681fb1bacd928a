"""What is left when all is quiet again: nothing should be."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp

from bench.soak.scrape import Scraper
from bench.soak.stack import MODEL, Sidecar, Stack
from kvloop import rpc
from kvloop.errors import KvloopError
from kvloop.kvmeta.v1 import ledger_pb2, ledger_pb2_grpc

_LOOK_SECONDS = 0.5
_CALL_SECONDS = 10.0
_TENANT = "default"
_PAGE = 1000
_COUNTED = (
    "turns_total",
    "misses_total",
    "fallbacks_total",
    "handle_returns_total",
    "errors_total",
)
_USABLE = ("AVAILABLE", "TAKEN")


@dataclass
class Look:
    """What all processes hold at one moment.

    Attributes:
        held: what must be 0 at rest, by what and where.
        standing: what must be the same at rest as before the load.
        rows: conversations in the ledger, by state.
        away: processes that did not answer.
    """

    held: dict[str, float] = field(default_factory=dict)
    standing: dict[str, float] = field(default_factory=dict)
    rows: Counter[str] = field(default_factory=Counter)
    away: list[str] = field(default_factory=list)

    @property
    def still_held(self) -> dict[str, float]:
        """What is not 0."""
        return {what: count for what, count in self.held.items() if count}

    @property
    def quiet(self) -> bool:
        """Whether all answered and nothing is held."""
        return not self.away and not self.still_held


def grown(before: Look, after: Look) -> dict[str, tuple[float, float]]:
    """What stands at a higher number than before the load."""
    return {
        what: (before.standing[what], count)
        for what, count in after.standing.items()
        if count > before.standing.get(what, count)
    }


class Inspector:
    """Looks at everything; made by `inspecting`.

    Args:
        stack: what runs.
        scraper: asks processes over HTTP.
        ledger: asks kvmeta.
    """

    def __init__(
        self, stack: Stack, scraper: Scraper, ledger: ledger_pb2_grpc.LedgerServiceAsyncStub
    ) -> None:
        self._stack = stack
        self._scraper = scraper
        self._ledger = ledger

    async def look(self) -> Look:
        """What is held now."""
        found = Look()
        for router in self._stack.routers:
            await self._router(found, router.service.name, router.metrics_port)
        for sidecar in self._stack.sidecars:
            await self._worker(found, sidecar)
        await self._kvmeta(found)
        return found

    async def until(
        self, rests: Callable[[Look], bool], seconds: float, watch: Callable[[Look], None]
    ) -> Look:
        """Wait until all is at rest, for so long at most; the last look.

        Args:
            rests: whether a look shows all at rest; asked once about each.
            seconds: how long at most.
            watch: shown each look that does not.
        """
        found = await self.look()
        try:
            async with asyncio.timeout(seconds):
                while not rests(found):
                    watch(found)
                    await asyncio.sleep(_LOOK_SECONDS)
                    found = await self.look()
        except TimeoutError:
            pass
        return found

    async def counted(self) -> dict[str, dict[str, float]]:
        """What each router has counted in its present life."""
        found = {}
        for router in self._stack.routers:
            metrics = await self._scraper.metrics(router.metrics_port)
            if metrics is not None:
                for name in _COUNTED:
                    values = metrics.by_label(f"kvloop_router_{name}")
                    found[f"{router.service.name}: {name}"] = dict(values)
        return found

    async def _router(self, found: Look, name: str, port: int) -> None:
        metrics = await self._scraper.metrics(port)
        if metrics is None:
            found.away.append(name)
            return
        found.held[f"{name}: running turns"] = metrics.total("kvloop_router_running_turns")
        found.held[f"{name}: waiting turns"] = metrics.total("kvloop_router_waiting_turns")
        channels = metrics.total("kvloop_router_worker_channels")
        found.held[f"{name}: channels beyond one per worker"] = channels - len(self._stack.sidecars)
        found.standing[f"{name}: tasks"] = metrics.total("kvloop_loop_tasks")
        found.standing[f"{name}: open files"] = metrics.total("process_open_fds")

    async def _worker(self, found: Look, sidecar: Sidecar) -> None:
        name = sidecar.worker_id
        metrics = await self._scraper.metrics(sidecar.metrics_port)
        state = await self._scraper.engine(sidecar.engine_port)
        if metrics is None or state is None:
            found.away.append(name)
            return
        found.held[f"{name}: legs"] = metrics.total("kvloop_worker_legs_in_flight")
        found.held[f"{name}: pins known"] = metrics.total("kvloop_worker_retained_pins")
        found.held[f"{name}: orphan pins"] = metrics.total("kvloop_worker_orphan_pins")
        for queue in ("running", "loading", "waiting", "pins"):
            found.held[f"{name}: engine's {queue}"] = len(state[queue])
        found.held[f"{name}: blocks in use"] = state["blocks"]["used"]
        found.standing[f"{name}: tasks"] = metrics.total("kvloop_loop_tasks")
        found.standing[f"{name}: open files"] = metrics.total("process_open_fds")

    async def _kvmeta(self, found: Look) -> None:
        request = ledger_pb2.ListConversationsRequest(tenant=_TENANT, model=MODEL, page_size=_PAGE)
        try:
            while True:
                with rpc.typed_errors():
                    page = await self._ledger.ListConversations(request, timeout=_CALL_SECONDS)
                found.rows.update(
                    ledger_pb2.Conversation.State.Name(row.state).removeprefix("STATE_")
                    for row in page.conversations
                )
                request.page_token = page.next_page_token
                if not request.page_token:
                    break
        except KvloopError:
            found.away.append("kvmeta")
        metrics = await self._scraper.metrics(self._stack.kvmeta_metrics_port)
        if metrics is None:
            found.away.append("kvmeta's metrics")
        else:
            found.standing["kvmeta: tasks"] = metrics.total("kvloop_loop_tasks")
        for state in _USABLE:
            found.held[f"kvmeta: handles {state}"] = found.rows[state]


@asynccontextmanager
async def inspecting(stack: Stack) -> AsyncIterator[Inspector]:
    """An inspector of what runs."""
    timeout = aiohttp.ClientTimeout(total=_CALL_SECONDS)
    async with (
        aiohttp.ClientSession(
            timeout=timeout, connector=aiohttp.TCPConnector(force_close=True)
        ) as session,
        rpc.open_channel(f"127.0.0.1:{stack.kvmeta.port}") as channel,
    ):
        yield Inspector(stack, Scraper(session), ledger_pb2_grpc.LedgerServiceStub(channel))
