"""A kvmeta that keeps what it is told, over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from google.protobuf import duration_pb2

from kvloop.kvmeta.v1 import ledger_pb2, ledger_pb2_grpc, registry_pb2, registry_pb2_grpc
from services.common import rpc_server


class FakeKvmeta(ledger_pb2_grpc.LedgerServiceServicer, registry_pb2_grpc.RegistryServiceServicer):
    """The part of kvmeta that sidecars use."""

    port = 0

    def __init__(self) -> None:
        self.commits: list[ledger_pb2.CommitTurnRequest] = []
        self.stored: list[ledger_pb2.CommitTurnRequest] = []
        self.registered: list[registry_pb2.RegisterWorkerRequest] = []
        self.renewals: list[registry_pb2.KeepAliveRequest] = []
        self.ended: list[str] = []
        self.audits: list[ledger_pb2.RenewPinsRequest] = []
        self.evictions: list[ledger_pb2.EvictHandlesRequest] = []
        self.error: Exception | None = None
        self.hold: asyncio.Event | None = None
        self.lease_seconds = 30
        self.lease_gone = False

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def CommitTurn(self, request, context):
        self.commits.append(request)
        if self.hold is not None:
            await self.hold.wait()
        if self.error is not None:
            raise self.error
        self.stored.append(request)
        return ledger_pb2.CommitTurnResponse(
            handle_id="h1", granted_ttl=duration_pb2.Duration(seconds=470)
        )

    async def RenewPins(self, request, context):
        self.audits.append(request)
        if self.error is not None:
            raise self.error
        stored = {commit.request_id: commit for commit in self.stored}
        statuses = ledger_pb2.PinStatus
        return ledger_pb2.RenewPinsResponse(
            pins=[
                statuses(
                    turn_id=pin.turn_id,
                    verdict=statuses.VERDICT_WANTED,
                    wanted_for=duration_pb2.Duration(seconds=400),
                    key=stored[pin.turn_id].key,
                )
                if pin.turn_id in stored
                else statuses(turn_id=pin.turn_id, verdict=statuses.VERDICT_UNOWNED)
                for pin in request.pins
            ]
        )

    async def EvictHandles(self, request, context):
        self.evictions.append(request)
        if self.error is not None:
            raise self.error
        return ledger_pb2.EvictHandlesResponse(evicted_turn_ids=request.turn_ids)

    async def RegisterWorker(self, request, context):
        if self.error is not None:
            raise self.error
        self.registered.append(request)
        self.lease_gone = False
        return registry_pb2.RegisterWorkerResponse(
            lease_id=f"lease-{len(self.registered)}",
            granted_ttl=duration_pb2.Duration(seconds=self.lease_seconds),
        )

    async def KeepAlive(self, request_iterator, context):
        async for request in request_iterator:
            self.renewals.append(request)
            seconds = 0 if self.lease_gone else self.lease_seconds
            yield registry_pb2.KeepAliveResponse(
                lease_id=request.lease_id, granted_ttl=duration_pb2.Duration(seconds=seconds)
            )

    async def DeregisterWorker(self, request, context):
        self.ended.append(request.lease_id)
        return registry_pb2.DeregisterWorkerResponse()


@asynccontextmanager
async def fake_kvmeta(kvmeta: FakeKvmeta | None = None, port: int = 0) -> AsyncIterator[FakeKvmeta]:
    """Serve it; pass one in to bring it back after an outage."""
    fake = kvmeta or FakeKvmeta()  # type: ignore[abstract]

    def add(server):
        ledger_pb2_grpc.add_LedgerServiceServicer_to_server(fake, server)
        registry_pb2_grpc.add_RegistryServiceServicer_to_server(fake, server)

    services = [
        ledger_pb2.DESCRIPTOR.services_by_name["LedgerService"],
        registry_pb2.DESCRIPTOR.services_by_name["RegistryService"],
    ]
    async with rpc_server.serve(f"127.0.0.1:{port}", add, services, grace_seconds=0) as bound:
        fake.port = bound
        yield fake
