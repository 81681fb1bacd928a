"""Workers in a real registry, without a sidecar."""

from __future__ import annotations

import grpc

from services.worker.registry import GrpcRegistry
from services.worker.worker_record import worker_record
from tests.unit.worker.fakes import hello


async def register_decode(channel: grpc.aio.Channel, worker_id: str) -> None:
    """A decode worker, for as long as any test lasts."""
    record = worker_record(
        hello(),
        role="decode",
        worker_id=worker_id,
        address="127.0.0.1:7400",
        model="tiny",
        prepared_legs=0,
    )
    await GrpcRegistry(channel).register(record, ttl_seconds=300)
