"""64 takers of each handle at once, through gRPC, at every kvmeta there is."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack

import pytest

from kvloop import rpc
from kvloop.common.v1 import common_pb2
from kvloop.kvmeta.v1 import ledger_pb2, ledger_pb2_grpc, registry_pb2_grpc
from tests.contract.kvmeta_process import run_kvmeta
from tests.unit.kvmeta import messages

pytestmark = pytest.mark.timeout(300)

CONVERSATIONS = 1_000
TAKERS = 64
# Conversations raced for at a time: their takers fit into the replicas' pools of
# connections many times over, and no call waits for one until it is refused.
AT_ONCE = 4


async def test_of_64_takers_of_each_of_1000_conversations_one_wins_on_sqlite(tmp_path) -> None:
    wins = await race(f"sqlite:///{tmp_path}/ledger.db", replicas=1)
    assert wins == [CONVERSATIONS]


async def test_of_64_takers_at_two_replicas_on_postgresql_one_wins(postgres) -> None:
    wins = await race(postgres.url, replicas=2)
    assert sum(wins) == CONVERSATIONS
    assert min(wins) > 0, "one replica won no race: they did not run at the same time"


async def race(database_url: str, *, replicas: int) -> list[int]:
    """Let takers race for every conversation; how many handles each replica gave out."""
    async with AsyncExitStack() as stack:
        ledgers = []
        for _ in range(replicas):
            kvmeta = await stack.enter_async_context(run_kvmeta(database_url))
            channel = await stack.enter_async_context(rpc.open_channel(f"127.0.0.1:{kvmeta.port}"))
            ledgers.append(ledger_pb2_grpc.LedgerServiceStub(channel))
        await registry_pb2_grpc.RegistryServiceStub(channel).RegisterWorker(
            messages.register(ttl=300)
        )
        wins = [0] * replicas
        names = iter([f"raced-{number}" for number in range(CONVERSATIONS)])
        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(_race_each(names, ledgers, wins))
        return wins


async def _race_each(
    names: Iterator[str], ledgers: Sequence[ledger_pb2_grpc.LedgerServiceAsyncStub], wins: list[int]
) -> None:
    for name in names:
        stored = await ledgers[0].CommitTurn(messages.commit(name, f"{name}-first"))
        calls = [
            ledgers[taker % len(ledgers)].TakeHandle(messages.take(name, f"{name}-{taker}"))
            for taker in range(TAKERS)
        ]
        answers = [await call for call in calls]
        winner = _check(answers, stored.handle_id)
        wins[winner % len(ledgers)] += 1


def _check(answers: Sequence[ledger_pb2.TakeHandleResponse], handle_id: str) -> int:
    """Exactly one taker got the handle, and each a turn of its own; who it was."""
    winners = [taker for taker, answer in enumerate(answers) if answer.HasField("handle")]
    assert len(winners) == 1
    assert answers[winners[0]].handle.handle_id == handle_id
    reasons = Counter(answer.miss_reason for answer in answers if not answer.HasField("handle"))
    assert reasons == {common_pb2.MISS_REASON_TAKEN: TAKERS - 1}
    # The first turn was the one that left the handle behind.
    assert sorted(answer.turn for answer in answers) == list(range(2, TAKERS + 2))
    return winners[0]
