"""Reads what kvmeta knows: conversations and workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc

from kvloop import rpc
from kvloop.kvmeta.v1 import ledger_pb2, ledger_pb2_grpc, registry_pb2, registry_pb2_grpc

DEFAULT_KVMETA = "127.0.0.1:7200"
_TIMEOUT_SECONDS = 10.0


def list_conversations(
    kvmeta: str, *, tenant: str, model: str = "", page_size: int = 0
) -> Iterator[ledger_pb2.Conversation]:
    """A tenant's conversations, most recent first, page after page.

    Args:
        kvmeta: host:port of kvmeta.
        tenant: whose.
        model: keep one model's only.
        page_size: entries per call; 0 is kvmeta's default.

    Raises:
        KvloopError: kvmeta cannot be reached or refused.
    """
    request = ledger_pb2.ListConversationsRequest(tenant=tenant, model=model, page_size=page_size)
    with grpc.insecure_channel(kvmeta, options=rpc.OPTIONS) as channel:
        stub = ledger_pb2_grpc.LedgerServiceStub(channel)
        for page in _pages(stub.ListConversations, request):
            yield from page.conversations


def list_workers(
    kvmeta: str, *, model: str = "", page_size: int = 0
) -> Iterator[registry_pb2.WorkerEntry]:
    """Live workers, sorted by id, page after page.

    Args:
        kvmeta: host:port of kvmeta.
        model: keep one model's only.
        page_size: entries per call; 0 is kvmeta's default.

    Raises:
        KvloopError: kvmeta cannot be reached or refused.
    """
    request = registry_pb2.ListWorkersRequest(model=model, page_size=page_size)
    with grpc.insecure_channel(kvmeta, options=rpc.OPTIONS) as channel:
        stub = registry_pb2_grpc.RegistryServiceStub(channel)
        for page in _pages(stub.ListWorkers, request):
            yield from page.workers


def _pages(call: Callable[..., Any], request: Any) -> Iterator[Any]:
    while True:
        with rpc.typed_errors():
            page = call(request, timeout=_TIMEOUT_SECONDS)
        yield page
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token
