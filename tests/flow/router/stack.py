"""A router with everything around it faked, and a client to ask it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from kvloop import rpc
from kvloop.common.v1 import common_pb2
from kvloop.kvmeta.v1 import registry_pb2
from kvloop.router.v1 import router_pb2, router_pb2_grpc
from services.router import app
from services.router.settings import RouterSettings
from tests.flow.patience import PATIENT_ROUTER
from tests.flow.router.fakes import (
    FakeWorker,
    LedgerServicer,
    RegistryServicer,
    eventually,
    fake_kvmeta,
    fake_worker,
    make_worker,
    serve_kvmeta,
    serve_worker,
)
from tests.flow.router.memory_ledger import MODEL, MemoryLedger

PREFILL = common_pb2.WORKER_ROLE_PREFILL
DECODE = common_pb2.WORKER_ROLE_DECODE


@dataclass
class Answer:
    """What a client received."""

    chunks: list[bytes] = field(default_factory=list)
    result: router_pb2.TurnResult = field(default_factory=router_pb2.TurnResult)

    @property
    def receipt(self) -> router_pb2.Receipt:
        return self.result.receipt

    @property
    def miss(self) -> str:
        """Name of the miss reason without its prefix; UNSPECIFIED if there was none."""
        name = common_pb2.MissReason.Name(self.receipt.miss_reason)
        return name.removeprefix("MISS_REASON_")


@dataclass
class Stack:
    """The parts that tests look at."""

    router: app.Router
    channel: grpc.aio.Channel
    ledger: MemoryLedger
    ledger_servicer: LedgerServicer
    registry: RegistryServicer
    workers: dict[str, FakeWorker]

    def __getitem__(self, worker_id: str) -> FakeWorker:
        return self.workers[worker_id]

    @property
    def stub(self) -> router_pb2_grpc.RouterServiceAsyncStub:
        return router_pb2_grpc.RouterServiceStub(self.channel)

    @property
    def worker_calls(self) -> int:
        """Calls of any kind that reached any worker."""
        return sum(worker.calls for worker in self.workers.values())

    def give_handle(
        self, conversation_id: str, worker_id: str, params: bytes = b'{"blocks":[[1,2]]}'
    ) -> str:
        """Let the ledger hold a handle of that worker; returns its id."""
        key = common_pb2.ConversationKey(
            tenant="default", model=MODEL, conversation_id=conversation_id
        )
        return self.ledger.commit(key, self[worker_id].worker, params, turn=1).handle_id

    def count(self, name: str, **labels: str) -> float:
        """Value of a counter of the router."""
        value = self.router.metrics.registry.get_sample_value(f"kvloop_router_{name}", labels)
        return value or 0.0

    async def chat(
        self, conversation_id: str = "", *, timeout_seconds: float | None = None, **fields: Any
    ) -> Answer:
        """Run one chat turn to its end."""
        answer = Answer()
        with rpc.typed_errors():
            call = self.stub.Chat(chat_request(conversation_id, **fields), timeout=timeout_seconds)
            async for event in call:
                if event.HasField("result"):
                    answer.result = event.result
                else:
                    answer.chunks.append(event.chunk.json)
        return answer


def chat_request(conversation_id: str = "", **fields: Any) -> router_pb2.ChatRequest:
    """A small valid chat turn."""
    defaults: dict[str, Any] = {
        "model": MODEL,
        "messages": [router_pb2.ChatMessage(role="user", content="hello")],
        "conversation_id": conversation_id,
    }
    return router_pb2.ChatRequest(**(defaults | fields))


def slow_clock() -> float:
    """Time that passes so slowly that no worker of a busy test machine looks busy."""
    return time.monotonic() / 100


@asynccontextmanager
async def running(
    *,
    prefill: Sequence[str] = ("p0",),
    decode: Sequence[str] = ("d0",),
    registered: Sequence[registry_pb2.Worker] | None = None,
    traits: Mapping[str, Mapping[str, object]] | None = None,
    settings: dict[str, Any] | None = None,
    rng: Any = lambda: 0.0,
    clock: Callable[[], float] = slow_clock,
    **overrides: Any,
) -> AsyncIterator[Stack]:
    """A router over fake workers of those names and a fake kvmeta.

    Args:
        prefill: ids of the prefill workers.
        decode: ids of the decode workers.
        registered: what the registry lists, if not the fake workers.
        traits: engine traits that differ from the default, by worker id.
        settings: settings that differ from the default.
        rng: breaks ties; by default in the order of registration.
        clock: of the router; by default one on which nothing takes long.
        overrides: for `app.build`.
    """
    ledger = MemoryLedger()
    async with AsyncExitStack() as stack:
        workers = {}
        for worker_id in (*prefill, *decode):
            role = PREFILL if worker_id in prefill else DECODE
            worker = make_worker(worker_id, role, **(traits or {}).get(worker_id, {}))  # type: ignore[arg-type]
            workers[worker_id] = fake_worker(worker, ledger)
            await stack.enter_async_context(serve_worker(workers[worker_id]))
        listed = [w.worker for w in workers.values()] if registered is None else registered
        ledger_servicer, registry = fake_kvmeta(ledger, listed)
        kvmeta_port = await stack.enter_async_context(serve_kvmeta(ledger_servicer, registry))
        chosen = {
            "listen": "127.0.0.1:0",
            "gateway_listen": "",
            "kvmeta": f"127.0.0.1:{kvmeta_port}",
            # The one whose ties are in the tests' hands: see `rng`.
            "policy": "least_loaded",
            **PATIENT_ROUTER,
            "registry_retry_seconds": 0.01,
            "registry_retry_max_seconds": 0.05,
            "shutdown_grace_seconds": 0.0,
            **(settings or {}),
        }
        router = await stack.enter_async_context(
            app.build(RouterSettings(**chosen), rng=rng, clock=clock, **overrides)
        )
        channel = await stack.enter_async_context(rpc.open_channel(f"127.0.0.1:{router.port}"))
        if registry.workers:
            await eventually(lambda: router.follower.connected)
        yield Stack(router, channel, ledger, ledger_servicer, registry, workers)
