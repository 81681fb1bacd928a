"""A kvmeta that lists what a test gave it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvloop.kvmeta.v1 import ledger_pb2, ledger_pb2_grpc, registry_pb2, registry_pb2_grpc
from kvloop.worker.v1 import worker_pb2, worker_pb2_grpc
from services.common import rpc_server


class FakeKvmeta(
    ledger_pb2_grpc.LedgerServiceServicer,
    registry_pb2_grpc.RegistryServiceServicer,
    worker_pb2_grpc.WorkerServiceServicer,
):
    """Lists one entry per page, so that every caller has to turn pages.

    It also answers for a worker.
    """

    address = ""

    def __init__(self) -> None:
        self.pins: list[ledger_pb2.Pin] = []
        self.asked_for: list[ledger_pb2.ListPinsRequest] = []
        self.info = worker_pb2.GetWorkerInfoResponse()
        self.conversations: list[ledger_pb2.Conversation] = []
        self.workers: list[registry_pb2.WorkerEntry] = []

    async def ListConversations(self, request, context):
        index = int(request.page_token or 0)
        return ledger_pb2.ListConversationsResponse(
            conversations=self.conversations[index : index + 1],
            next_page_token=str(index + 1) if index + 1 < len(self.conversations) else "",
        )

    async def ListPins(self, request, context):
        self.asked_for.append(request)
        index = int(request.page_token or 0)
        return ledger_pb2.ListPinsResponse(
            pins=self.pins[index : index + 1],
            next_page_token=str(index + 1) if index + 1 < len(self.pins) else "",
        )

    async def GetWorkerInfo(self, request, context):
        return self.info

    async def ListWorkers(self, request, context):
        index = int(request.page_token or 0)
        return registry_pb2.ListWorkersResponse(
            workers=self.workers[index : index + 1],
            next_page_token=str(index + 1) if index + 1 < len(self.workers) else "",
        )


@asynccontextmanager
async def serve_kvmeta(kvmeta: FakeKvmeta) -> AsyncIterator[str]:
    """Serve it on a free port; yields its address."""

    def add(server):
        ledger_pb2_grpc.add_LedgerServiceServicer_to_server(kvmeta, server)
        registry_pb2_grpc.add_RegistryServiceServicer_to_server(kvmeta, server)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(kvmeta, server)

    async with rpc_server.serve("127.0.0.1:0", add, [], grace_seconds=0) as port:
        kvmeta.address = f"127.0.0.1:{port}"
        yield kvmeta.address
