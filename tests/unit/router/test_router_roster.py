"""What a roster keeps is what its workers are, whatever has happened to them."""

from __future__ import annotations

import asyncio
import random
from contextlib import AbstractContextManager, suppress
from typing import Any

import pytest

from kvloop.errors import KvloopError, UnavailableError
from services.router.candidates import Roster
from tests.flow.router.fakes import make_worker
from tests.flow.router.stack import DECODE, PREFILL
from tests.unit.router.pool_harness import Harness, harness

ENDS = (
    None,
    UnavailableError("", reason="WORKER_UNREACHABLE"),
    UnavailableError("", reason="DRAINING"),
    asyncio.CancelledError(),
)


async def happen(
    pool: Harness, chance: random.Random, running: list[AbstractContextManager[Any]]
) -> None:
    """Let one thing happen to one of a few workers."""
    number = chance.randrange(4)
    worker_id, role = f"w{number}", (PREFILL, DECODE)[number % 2]
    match chance.choice(("put", "put", "remove", "forget", "wait", "begin", "end", "end")):
        case "put":
            worker = make_worker(
                worker_id, role, epoch=chance.choice("aab"), block_size=chance.choice((16, 32))
            )
            if chance.random() < 0.3:
                worker.state = worker.STATE_DRAINING
            await pool.pool.put(worker)
        case "remove":
            pool.pool.remove(worker_id)
        case "forget":
            pool.pool.keep_only({"w0", "w1"})
        case "wait":
            pool.now += chance.choice((1, 5, 11))
        case "begin":
            with suppress(UnavailableError):
                use = pool.pool.use(worker_id)
                use.__enter__()
                running.append(use)
        case "end" if running:
            end(running.pop(chance.randrange(len(running))), chance.choice(ENDS))


def end(use: AbstractContextManager[Any], error: BaseException | None) -> None:
    """End a turn, well or with an error."""
    with suppress(KvloopError, asyncio.CancelledError):
        use.__exit__(None if error is None else type(error), error, None)


def check(roster: Roster) -> None:
    """Compare what it keeps with what its workers say now."""
    usable = [each for each in roster if each.takes_turns and each.reachable]
    assert list(roster.usable) == usable
    assert list(roster.numbers) == [each.number for each in usable]
    assert roster.kinds.keys() == {each.kind for each in usable}
    assert all(any(one is each.worker for each in usable) for one in roster.kinds.values())


@pytest.mark.parametrize("seed", range(20))
async def test_a_roster_is_never_behind_its_workers(seed: int) -> None:
    chance = random.Random(seed)
    running: list[AbstractContextManager[Any]] = []
    async with harness() as pool:
        for _ in range(200):
            await happen(pool, chance, running)
            rosters = [pool.pool.candidates("tiny", role) for role in (PREFILL, DECODE)]
            for roster in rosters:
                check(roster)
            everyone = {each for roster in rosters for each in roster}
            assert everyone == set(pool.pool.all().values())
        for use in running:
            end(use, None)
