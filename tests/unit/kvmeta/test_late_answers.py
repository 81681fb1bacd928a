"""A handle that reaches its caller too late to be used is a miss."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from services.kvmeta.bell import Bell
from services.kvmeta.ledger import Ledger
from services.kvmeta.memory_store import MemoryStore
from services.kvmeta.metrics import KvmetaMetrics
from services.kvmeta.model import MissReason
from services.kvmeta.store import Miss
from tests.contract.kvmeta_stores import POLICY, commit, key, register, stored


async def test_an_answer_that_comes_after_the_engines_deadline_is_a_miss(clock) -> None:
    class Slow(MemoryStore):
        async def take(self, key, request_id):
            outcome = await super().take(key, request_id)
            clock.advance(475)
            return outcome

    store = Slow(clock, POLICY)
    ledger = Ledger(
        store,
        clock,
        POLICY,
        max_params_bytes=1000,
        released=Bell(),
        metrics=KvmetaMetrics(CollectorRegistry()),
        watch_poll_seconds=1,
    )
    await register(store)
    await stored(store, commit())
    outcome = await ledger.take(key(), "r2")
    assert outcome == Miss(turn=2, reason=MissReason.EXPIRED, last_worker_id="d1")
