"""PostgreSQL is away for 20 seconds: turns go on without it, and nobody restarts anything."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.contract.postgres_server import PostgresServer
from tests.flow.kvmeta.stack import Talk, Turn, stack

pytestmark = pytest.mark.timeout(180)

# Longer than a worker's lease, which cannot be renewed meanwhile.
OUTAGE_SECONDS = 20
# By its settings a router waits for the ledger for 0.25 s before it goes on, and a
# sidecar for 2 s with the end of the answer. The rest is for a busy machine.
LONGEST_TTFT_SECONDS = 3
LONGEST_TURN_SECONDS = 6
_PAUSE_SECONDS = 1

Act = Callable[[PostgresServer], None]


def _crash(server: PostgresServer) -> None:
    server.stop("immediate")


@pytest.mark.parametrize(
    ("leave", "come_back"),
    [
        pytest.param(PostgresServer.pause, PostgresServer.resume, id="hung"),
        pytest.param(_crash, PostgresServer.start, id="crashed"),
    ],
)
async def test_turns_recompute_while_postgresql_is_away_and_then_reuse_goes_on(
    postgres: PostgresServer, tmp_path, leave: Act, come_back: Act
) -> None:
    async with stack(tmp_path, postgres.url) as clients:
        talking, silent = clients.talk("talking"), clients.patient_talk("silent")
        await talking.until_reuse()
        before = await silent.until_reuse()

        await asyncio.to_thread(leave, postgres)
        turns = await _talk_for(talking, OUTAGE_SECONDS)
        await asyncio.to_thread(come_back, postgres)

        assert {turn.receipt.miss_reason for turn in turns} == {"LEDGER_UNAVAILABLE"}
        assert {turn.receipt.decode_worker_id for turn in turns} == {"decode-0"}
        for turn in turns:
            assert turn.receipt.ttft_seconds - turn.held_up_seconds < LONGEST_TTFT_SECONDS
            assert turn.seconds - turn.held_up_seconds < LONGEST_TURN_SECONDS
        await talking.until_reuse()
        # What was stored before the outage has outlived it.
        after = await silent.say()
        assert after.receipt.handle_hit
        assert after.receipt.turn == before.receipt.turn + 1


async def _talk_for(talk: Talk, seconds: float) -> list[Turn]:
    """Turn after turn for that long, at a person's pace.

    Each leaves a commit to repeat and its blocks pinned. Hundreds of them would use up
    the budget for retained KV, at the cost of those who are silent.
    """
    clock = asyncio.get_running_loop().time
    end = clock() + seconds
    turns = []
    while clock() < end:
        turns.append(await talk.say())
        await asyncio.sleep(_PAUSE_SECONDS)
    return turns
