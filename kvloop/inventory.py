"""Reads what kvmeta and the workers know: conversations, workers, retained KV."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kvloop import rpc
from kvloop.kvmeta.v1 import ledger_pb2, ledger_pb2_grpc, registry_pb2, registry_pb2_grpc
from kvloop.tls import TlsSource
from kvloop.worker.v1 import worker_pb2, worker_pb2_grpc

DEFAULT_KVMETA = "127.0.0.1:7200"
_TIMEOUT_SECONDS = 10.0


def list_conversations(
    kvmeta: str, *, tenant: str, model: str = "", page_size: int = 0, tls: TlsSource | None = None
) -> Iterator[ledger_pb2.Conversation]:
    """A tenant's conversations, most recent first, page after page.

    Args:
        kvmeta: host:port of kvmeta.
        tenant: whose.
        model: keep one model's only.
        page_size: entries per call; 0 is kvmeta's default.
        tls: how to speak TLS; without it nothing is encrypted.

    Raises:
        KvloopError: kvmeta cannot be reached or refused.
    """
    request = ledger_pb2.ListConversationsRequest(tenant=tenant, model=model, page_size=page_size)
    with rpc.make_channel(kvmeta, tls) as channel:
        stub = ledger_pb2_grpc.LedgerServiceStub(channel)
        for page in _pages(stub.ListConversations, request):
            yield from page.conversations


def list_workers(
    kvmeta: str, *, model: str = "", page_size: int = 0, tls: TlsSource | None = None
) -> Iterator[registry_pb2.WorkerEntry]:
    """Live workers, sorted by id, page after page.

    Args:
        kvmeta: host:port of kvmeta.
        model: keep one model's only.
        page_size: entries per call; 0 is kvmeta's default.
        tls: how to speak TLS; without it nothing is encrypted.

    Raises:
        KvloopError: kvmeta cannot be reached or refused.
    """
    request = registry_pb2.ListWorkersRequest(model=model, page_size=page_size)
    with rpc.make_channel(kvmeta, tls) as channel:
        stub = registry_pb2_grpc.RegistryServiceStub(channel)
        for page in _pages(stub.ListWorkers, request):
            yield from page.workers


def list_pins(
    kvmeta: str,
    *,
    worker_id: str = "",
    tenant: str = "",
    model: str = "",
    page_size: int = 0,
    tls: TlsSource | None = None,
) -> Iterator[ledger_pb2.Pin]:
    """What decode workers retain, of all tenants, by worker and age, page after page.

    Args:
        kvmeta: host:port of kvmeta.
        worker_id: keep one worker's only.
        tenant: keep one tenant's only.
        model: keep one model's only.
        page_size: entries per call; 0 is kvmeta's default.
        tls: how to speak TLS; without it nothing is encrypted.

    Raises:
        KvloopError: kvmeta cannot be reached or refused.
    """
    request = ledger_pb2.ListPinsRequest(
        worker_id=worker_id, tenant=tenant, model=model, page_size=page_size
    )
    with rpc.make_channel(kvmeta, tls) as channel:
        stub = ledger_pb2_grpc.LedgerServiceStub(channel)
        for page in _pages(stub.ListPins, request):
            yield from page.pins


def read_worker_info(
    address: str, *, tls: TlsSource | None = None
) -> worker_pb2.GetWorkerInfoResponse:
    """What a worker says of itself.

    Args:
        address: host:port of its sidecar.
        tls: how to speak TLS; without it nothing is encrypted.

    Raises:
        KvloopError: it cannot be reached or failed.
    """
    with rpc.make_channel(address, tls) as channel, rpc.typed_errors():
        info: worker_pb2.GetWorkerInfoResponse = worker_pb2_grpc.WorkerServiceStub(
            channel
        ).GetWorkerInfo(worker_pb2.GetWorkerInfoRequest(), timeout=_TIMEOUT_SECONDS)
    return info


def _pages(call: Callable[..., Any], request: Any) -> Iterator[Any]:
    while True:
        with rpc.typed_errors():
            page = call(request, timeout=_TIMEOUT_SECONDS)
        yield page
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token
