"""kill -9 of kvmeta under load: what its clients were told still holds afterwards."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from random import Random

import pytest

from kvloop.kvmeta.v1 import ledger_pb2
from tests.flow.kvmeta.history_check import check
from tests.flow.kvmeta.journal import Journal
from tests.flow.kvmeta.journal_client import JournalClient, committed_by
from tests.flow.kvmeta.ledger_spec import Freed, Given, Read, ReadReleases, Take
from tests.flow.kvmeta.mixed_load import run_mixed_load
from tests.flow.kvmeta.replicas import Replica, died_with_its_process, own_role, supervised
from tests.unit.kvmeta import messages

pytestmark = pytest.mark.timeout(300)

LOAD_SECONDS = 30
NAMES = [f"held-{number}" for number in range(40)]
SENTINEL = "sentinel"


async def test_three_kills_of_the_one_kvmeta_on_sqlite(tmp_path) -> None:
    async with supervised(f"sqlite:///{tmp_path}/ledger.db", died_with_its_process) as replica:
        await survive([replica], [[replica], [replica], [replica]])


async def test_kills_of_either_replica_and_of_both_on_postgresql(postgres) -> None:
    async with AsyncExitStack() as stack:
        replicas = []
        for name in ("one", "two"):
            url, gone = await stack.enter_async_context(own_role(postgres, name))
            replicas.append(await stack.enter_async_context(supervised(url, gone)))
        one, two = replicas
        await survive(replicas, [[one], [two], [one, two]])


async def survive(replicas: Sequence[Replica], kills: Sequence[Sequence[Replica]]) -> None:
    """Kill replicas in turn while clients hold conversations, then compare notes."""
    await replicas[0].registry.RegisterWorker(messages.register(ttl=300))
    journal = Journal()
    stop = asyncio.Event()
    between_kills = LOAD_SECONDS / (len(kills) + 1)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run_mixed_load(replicas, journal, NAMES, stop))
        for victims in kills:
            await asyncio.sleep(between_kills)
            await kill(victims)
        await asyncio.sleep(between_kills)
        while handles_given(journal) <= 10 * len(NAMES):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        stop.set()
    # Once more, so that what is read now is what was kept.
    await kill(replicas)
    await read_all(replicas, journal)
    histories = journal.conversations
    assert [found for calls in histories.values() if (found := check(calls))] == []
    answers = [call.answer for calls in histories.values() for call in calls]
    assert answers.count(None) >= len(kills), "no call was under way when a process died"


def handles_given(journal: Journal) -> int:
    """In all conversations."""
    calls = (call for calls in journal.conversations.values() for call in calls)
    return sum(isinstance(call.answer, Given) for call in calls)


async def kill(replicas: Sequence[Replica]) -> None:
    """kill -9 of all of these at once; they are up again at the end."""
    await asyncio.gather(*(replica.kill() for replica in replicas))
    await asyncio.gather(*(replica.up.wait() for replica in replicas))


async def read_all(replicas: Sequence[Replica], journal: Journal) -> None:
    """Note down what each conversation looks like, and whether its handle is given out."""
    client = JournalClient(replicas, journal, Random(0))
    freed = await read_releases(replicas[-1])
    for name in NAMES:
        await client.ask(name, Read())
        await client.ask(name, Take(f"{name}/last"))
        releases = journal.begin(name, ReadReleases())
        journal.answered(releases, Freed(frozenset(freed[name])))


async def read_releases(replica: Replica) -> dict[str, set[str]]:
    """The handles that D was told to free, by conversation."""
    # The last release is one that is known.
    await replica.ledger.CommitTurn(messages.commit("sentinel"))
    await replica.ledger.ReleaseConversation(
        ledger_pb2.ReleaseConversationRequest(key=messages.conversation("sentinel"))
    )
    freed: dict[str, set[str]] = defaultdict(set)
    seen: set[str] = set()
    watch = replica.ledger.WatchReleases(ledger_pb2.WatchReleasesRequest(worker_id="d1"))
    async for release in watch:
        assert release.handle.handle_id not in seen, "released twice"
        seen.add(release.handle.handle_id)
        if release.handle.transfer_params_json == messages.PARAMS:
            break
        request = committed_by(release.handle)
        freed[request.partition("/")[0]].add(request)
    watch.cancel()
    return freed
