"""Sidecars attached to simulated engines, used as a router uses them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvloop import rpc
from kvloop.common.v1 import common_pb2
from kvloop.worker.v1 import worker_pb2, worker_pb2_grpc
from services.worker import app as worker_app
from services.worker.settings import WorkerSettings
from tests.flow.patience import PATIENT_WORKER
from tests.flow.sim.engines import EngineClient, engine
from tests.flow.sim.ledgers import RememberingLedger, RememberingRegistry


@dataclass
class Sidecar:
    """One sidecar and its engine."""

    engine: EngineClient
    stub: worker_pb2_grpc.WorkerServiceAsyncStub
    ledger: RememberingLedger
    registry: RememberingRegistry


@dataclass
class Pair:
    """A prefill and a decode worker, used as a router does."""

    prefill: Sidecar
    decode: Sidecar
    turns: int = 0

    async def turn(
        self, body: dict[str, Any], handle: bytes = b"", *, conversation: str | None = "c"
    ) -> tuple[common_pb2.PrefillReport, list[dict[str, Any]], worker_pb2.DecodeSummary]:
        """Both legs."""
        self.turns += 1
        api, body_json = api_of(body), json.dumps(body).encode()
        handed = await self.prefill.stub.Prefill(
            worker_pb2.PrefillRequest(
                turn_id=f"turn-{self.turns}",
                api=api,
                body_json=body_json,
                transfer_params_json=handle,
                engine=self.decode.registry.workers[-1].engine if handle else None,
            )
        )
        chunks, summary = await self.decode_leg(
            body, handed.transfer_params_json, conversation=conversation
        )
        return handed.report, chunks, summary

    async def decode_leg(
        self, body: dict[str, Any], params: bytes = b"", *, conversation: str | None = "c"
    ) -> tuple[list[dict[str, Any]], worker_pb2.DecodeSummary]:
        """The decode leg alone."""
        request = worker_pb2.DecodeRequest(
            turn_id=f"turn-{self.turns}",
            api=api_of(body),
            body_json=json.dumps(body).encode(),
            transfer_params_json=params,
        )
        if conversation is not None:
            key = common_pb2.ConversationKey(
                tenant="default", model="sim-model", conversation_id=conversation
            )
            request.commit.CopyFrom(worker_pb2.TurnRef(key=key, turn=self.turns))
        events = [event async for event in self.decode.stub.Decode(request)]
        *chunks, last = events
        assert last.WhichOneof("event") == "summary"
        return [json.loads(event.chunk_json) for event in chunks], last.summary

    @property
    def handle(self) -> bytes:
        """Params of the newest commit."""
        return self.decode.ledger.commits[-1].params


def api_of(body: dict[str, Any]) -> common_pb2.Api.ValueType:
    if "messages" in body:
        return common_pb2.API_CHAT_COMPLETIONS
    return common_pb2.API_COMPLETIONS


@asynccontextmanager
async def open_sidecar(
    tmp_path: Path, role: str, sidecar: Mapping[str, Any] | None = None, **sim: Any
) -> AsyncIterator[Sidecar]:
    socket = tmp_path / f"{role}.sock"
    ledger, registry = RememberingLedger(), RememberingRegistry()
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(
            engine(role=role, events_socket=str(socket), **sim)
        )
        values: dict[str, Any] = {
            "role": role,
            "worker_id": role,
            "listen": "127.0.0.1:0",
            "engine_url": client.url,
            "events_socket": socket,
            "engine_poll_seconds": 60,
            **PATIENT_WORKER,
            **(sidecar or {}),
        }
        settings = WorkerSettings(**values)
        worker = await stack.enter_async_context(
            worker_app.build(settings, ledger=ledger, registry=registry)
        )
        channel = await stack.enter_async_context(rpc.open_channel(f"127.0.0.1:{worker.port}"))
        stub: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(channel)
        yield Sidecar(client, stub, ledger, registry)


@asynccontextmanager
async def open_pair(tmp_path: Path, **decode: Any) -> AsyncIterator[Pair]:
    async with (
        open_sidecar(tmp_path, "prefill") as first,
        open_sidecar(tmp_path, "decode", **decode) as second,
    ):
        yield Pair(first, second)
