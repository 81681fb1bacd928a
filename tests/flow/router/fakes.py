"""A ledger, a registry and workers for router tests, each behind a real gRPC server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from kvloop.common.v1 import common_pb2
from kvloop.errors import PreconditionError
from kvloop.kvmeta.v1 import ledger_pb2, ledger_pb2_grpc, registry_pb2, registry_pb2_grpc
from kvloop.worker.v1 import worker_pb2, worker_pb2_grpc
from services.common import rpc_server
from services.common.rpc_health import Health
from tests.flow.router.memory_ledger import MODEL, MemoryLedger

MAX_MODEL_LEN = 1000


async def eventually(condition: Callable[[], object]) -> None:
    """Wait until the condition holds; the test's own timeout is the limit."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


def make_worker(
    worker_id: str,
    role: common_pb2.WorkerRole.ValueType,
    *,
    model: str = MODEL,
    address: str = "127.0.0.1:1",
    epoch: str = "1",
    **traits: object,
) -> registry_pb2.Worker:
    """A worker as it would register."""
    return registry_pb2.Worker(
        worker_id=worker_id,
        role=role,
        address=address,
        model=model,
        engine=common_pb2.EngineRef(engine_id=f"{worker_id}-engine", epoch=epoch),
        traits=registry_pb2.EngineTraits(
            **{
                "contract_version": 1,
                "block_size": 16,
                "tensor_parallel_size": 1,
                "pipeline_parallel_size": 1,
                "kv_buffer_device": "cpu",
                "kv_cache_dtype": "auto",
                "bidirectional_kv_xfer": True,
                "max_model_len": MAX_MODEL_LEN,
                "prepared_legs": 8,
                **traits,
            }  # type: ignore[arg-type]
        ),
        state=registry_pb2.Worker.STATE_ACTIVE,
    )


class LedgerServicer(ledger_pb2_grpc.LedgerServiceServicer):
    """MemoryLedger over gRPC. `gate` holds TakeHandle back while it is closed."""

    def __init__(self, ledger: MemoryLedger) -> None:
        self.ledger = ledger
        self.gate = asyncio.Event()
        self.gate.set()
        self.waiting = 0

    async def TakeHandle(self, request, context):
        self.waiting += 1
        await self.gate.wait()
        self.waiting -= 1
        opening = await self.ledger.take_handle(request.key, request.request_id, timeout_seconds=1)
        return ledger_pb2.TakeHandleResponse(
            turn=opening.turn,
            last_worker_id=opening.last_worker_id,
            **(
                {"handle": opening.handle}
                if opening.handle is not None
                else {"miss_reason": opening.miss_reason}
            ),
        )

    async def ReturnHandle(self, request, context):
        await self.ledger.return_handle(
            request.key, request.handle_id, request.request_id, timeout_seconds=1
        )
        return ledger_pb2.ReturnHandleResponse()

    async def ReleaseConversation(self, request, context):
        ending = await self.ledger.release(request.key, timeout_seconds=1)
        return ledger_pb2.ReleaseConversationResponse(found=ending.found, released=ending.released)

    async def GetConversation(self, request, context):
        found = await self.ledger.get_conversation(request.key, timeout_seconds=1)
        return ledger_pb2.GetConversationResponse(conversation=found)


class RegistryServicer(registry_pb2_grpc.RegistryServiceServicer):
    """A registry that tests fill by hand."""

    def __init__(self, workers: Sequence[registry_pb2.Worker] = ()) -> None:
        self.workers = {worker.worker_id: worker for worker in workers}
        self.gate = asyncio.Event()  # until it is set nobody is told anything
        self.gate.set()
        self._watchers: list[asyncio.Queue[registry_pb2.WatchWorkersResponse | None]] = []

    async def WatchWorkers(self, request, context):
        queue: asyncio.Queue[registry_pb2.WatchWorkersResponse | None] = asyncio.Queue()
        self._watchers.append(queue)
        await self.gate.wait()
        kind = registry_pb2.WatchWorkersResponse
        for worker in list(self.workers.values()):
            yield kind(type=kind.TYPE_ADDED, worker=worker)
        yield kind(type=kind.TYPE_SYNCED)
        while (change := await queue.get()) is not None:
            yield change

    @property
    def watched(self) -> bool:
        """Whether somebody asked for the workers."""
        return bool(self._watchers)

    def hang_up(self) -> None:
        """End every watch, as a registry that stops does."""
        for queue in self._watchers:
            queue.put_nowait(None)

    def add(self, worker: registry_pb2.Worker) -> None:
        kind = registry_pb2.WatchWorkersResponse
        known = worker.worker_id in self.workers
        self.workers[worker.worker_id] = worker
        self._send(kind(type=kind.TYPE_CHANGED if known else kind.TYPE_ADDED, worker=worker))

    def remove(self, worker_id: str) -> None:
        kind = registry_pb2.WatchWorkersResponse
        self._send(kind(type=kind.TYPE_REMOVED, worker=self.workers.pop(worker_id)))

    def _send(self, change: registry_pb2.WatchWorkersResponse) -> None:
        for queue in self._watchers:
            queue.put_nowait(change)


class KeptHealth(Health):
    """Health that keeps what it was told of readiness."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[bool] = []

    def set_ready(self, ready: bool) -> None:
        self.said.append(ready)
        super().set_ready(ready)


Step = Callable[[], Awaitable[None]]


class FakeWorker(worker_pb2_grpc.WorkerServiceServicer):
    """A sidecar with a scripted engine.

    Each entry of a `*_steps` list is used by one call, before it answers: it may
    raise, wait, or do nothing.
    """

    def __init__(self, worker: registry_pb2.Worker, ledger: MemoryLedger) -> None:
        self.worker = worker
        self._ledger = ledger
        self.prefills: list[worker_pb2.PrefillRequest] = []
        self.decodes: list[worker_pb2.DecodeRequest] = []
        self.counts: list[worker_pb2.CountTokensRequest] = []
        self.prepares = True
        """False: as a sidecar that knows nothing of bodies that come ahead."""
        self.preparations: list[worker_pb2.PrefillRequest | worker_pb2.DecodeRequest] = []
        """Bodies that came ahead."""
        self.without_body = 0
        """Legs that relied on them."""
        self._waiting: dict[str, tuple[Any, asyncio.Event]] = {}
        self.prefill_timeouts: list[float | None] = []
        self.decode_timeouts: list[float | None] = []
        self.prefill_steps: list[Step] = []
        self.decode_steps: list[Step] = []
        self.mid_answer_steps: list[Step] = []
        self.after_summary_steps: list[Step] = []
        self.cancelled: list[str] = []
        self.report = common_pb2.PrefillReport(prompt_tokens=100, recomputed_tokens=100)
        self.pull_report = common_pb2.PrefillReport(
            prompt_tokens=100, proven_tokens=90, pulled_tokens=80, recomputed_tokens=20
        )
        self.handover: bytes | None = None
        self.chunks = [b'{"choices":[{"delta":{"content":"a"}}]}', b'{"choices":[]}']
        self.batches = False
        self.incomplete = False
        self.commit_outcome = worker_pb2.COMMIT_OUTCOME_COMMITTED
        self.num_tokens: int | Exception = 10
        self.estimates: list[worker_pb2.EstimatePullRequest] = []
        self.estimate_steps: list[Step] = []
        self.estimate = worker_pb2.EstimatePullResponse(reason="not measured yet")

    @property
    def worker_id(self) -> str:
        return self.worker.worker_id

    @property
    def calls(self) -> int:
        return len(self.prefills) + len(self.decodes) + len(self.counts)

    @property
    def params_seen(self) -> list[bytes]:
        """Params of every prefill call that came with some."""
        return [call.transfer_params_json for call in self.prefills if call.transfer_params_json]

    async def PreparePrefill(self, request, context):
        await self._keep(request.leg, context)
        return worker_pb2.PreparePrefillResponse()

    async def Prefill(self, request, context):
        request = self._whole(request)
        self.prefills.append(request)
        self.prefill_timeouts.append(context.time_remaining())
        await self._step(self.prefill_steps, "prefill")
        handover = self.handover
        if handover is None:
            handover = json.dumps({"from": self.worker_id, "turn": request.turn_id}).encode()
        return worker_pb2.PrefillResponse(
            transfer_params_json=handover,
            report=self.pull_report if request.transfer_params_json else self.report,
        )

    async def PrepareDecode(self, request, context):
        await self._keep(request.leg, context)
        return worker_pb2.PrepareDecodeResponse()

    async def _keep(self, leg: Any, context: Any) -> None:
        self.preparations.append(leg)
        if not self.prepares:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        taken = asyncio.Event()
        self._waiting[leg.turn_id] = leg, taken
        try:
            await taken.wait()
        except asyncio.CancelledError:
            self.cancelled.append("prepare")
            raise
        finally:
            self._waiting.pop(leg.turn_id, None)

    def lose_bodies(self) -> None:
        """Forget what came ahead; its calls stay open."""
        self._waiting.clear()

    def _whole(self, request: Any) -> Any:
        """The leg with the body that came ahead."""
        if not request.prepared:
            return request
        self.without_body += 1
        waiting = self._waiting.pop(request.turn_id, None)
        if waiting is None:
            raise PreconditionError("the body is not here", reason="NOT_PREPARED")
        leg, taken = waiting
        taken.set()
        whole = type(request)()
        whole.CopyFrom(leg)
        whole.MergeFrom(request)
        return whole

    async def Decode(self, request, context):
        request = self._whole(request)
        self.decodes.append(request)
        self.decode_timeouts.append(context.time_remaining())
        await self._step(self.decode_steps, "decode")
        try:
            for position, chunk in enumerate([] if self.batches else self.chunks):
                if position:
                    await self._step(self.mid_answer_steps, "decode")
                yield worker_pb2.DecodeResponse(chunk_json=chunk)
        except GeneratorExit:
            self.cancelled.append("decode")
            raise
        if self.incomplete:
            return
        summary = worker_pb2.DecodeSummary(
            usage=common_pb2.Usage(prompt_tokens=100, completion_tokens=2),
            commit_outcome=worker_pb2.COMMIT_OUTCOME_NOT_REQUESTED,
        )
        if request.HasField("commit"):
            summary.commit_outcome = self.commit_outcome
        if summary.commit_outcome == worker_pb2.COMMIT_OUTCOME_COMMITTED:
            params = b'{"remote_request_id":"%s"}' % request.turn_id.encode()
            self._ledger.commit(request.commit.key, self.worker, params, turn=request.commit.turn)
            summary.retained_tokens = 102
            summary.granted_ttl.FromSeconds(480)
        if self.batches:
            batch = worker_pb2.ChunkBatch(chunks_json=self.chunks, summary=summary)
            yield worker_pb2.DecodeResponse(batch=batch)
        else:
            yield worker_pb2.DecodeResponse(summary=summary)
        await self._step(self.after_summary_steps, "decode")

    async def CountTokens(self, request, context):
        self.counts.append(request)
        if isinstance(self.num_tokens, Exception):
            raise self.num_tokens
        return worker_pb2.CountTokensResponse(
            num_tokens=self.num_tokens, max_model_len=MAX_MODEL_LEN
        )

    async def Tokenize(self, request, context):
        return worker_pb2.TokenizeResponse(reply_json=b'{"count":1}')

    async def EstimatePull(self, request, context):
        self.estimates.append(request)
        await self._step(self.estimate_steps, "estimate")
        return self.estimate

    async def _step(self, steps: list[Step], leg: str) -> None:
        if not steps:
            return
        try:
            await steps.pop(0)()
        except asyncio.CancelledError:
            self.cancelled.append(leg)
            raise


def raises(error: Exception) -> Step:
    """A step that fails."""

    async def step() -> None:
        raise error

    return step


def waits(gate: asyncio.Event) -> Step:
    """A step that waits until the gate opens."""

    async def step() -> None:
        await gate.wait()

    return step


def fake_worker(worker: registry_pb2.Worker, ledger: MemoryLedger) -> FakeWorker:
    """A sidecar for that registration. The RPCs that routers never call are left out."""
    return FakeWorker(worker, ledger)  # type: ignore[abstract]


def fake_kvmeta(
    ledger: MemoryLedger, workers: Sequence[registry_pb2.Worker] = ()
) -> tuple[LedgerServicer, RegistryServicer]:
    """Ledger and registry. The RPCs that routers never call are left out."""
    return LedgerServicer(ledger), RegistryServicer(workers)  # type: ignore[abstract]


@asynccontextmanager
async def serve_worker(fake: FakeWorker, port: int = 0) -> AsyncIterator[int]:
    """Serve a fake worker and write its address into its registration."""
    async with rpc_server.serve(
        f"127.0.0.1:{port}",
        lambda server: worker_pb2_grpc.add_WorkerServiceServicer_to_server(fake, server),
        [],
        grace_seconds=0,
    ) as bound:
        fake.worker.address = f"127.0.0.1:{bound}"
        yield bound


@asynccontextmanager
async def serve_kvmeta(
    ledger: LedgerServicer, registry: RegistryServicer, port: int = 0
) -> AsyncIterator[int]:
    """Serve ledger and registry as kvmeta does."""

    def add(server: grpc.aio.Server) -> None:
        ledger_pb2_grpc.add_LedgerServiceServicer_to_server(ledger, server)
        registry_pb2_grpc.add_RegistryServiceServicer_to_server(registry, server)

    async with rpc_server.serve(f"127.0.0.1:{port}", add, [], grace_seconds=0) as bound:
        yield bound
