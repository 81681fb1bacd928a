"""How long a router takes to choose both workers of a turn."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from random import Random

from bench.scale.fleet import DECODE, MODEL, PREFILL, make_fleet, router_view
from kvloop.common.v1 import common_pb2
from services.router.policies import PolicyName
from services.router.policy import TurnFacts
from services.router.routing import Conversation, Routes
from services.router.workers import WorkerPool

_WARM_UP = 500


@dataclass(frozen=True)
class Durations:
    """Decisions of one policy among so many workers, in seconds of CPU time, sorted."""

    policy: PolicyName
    workers: int
    seconds: list[float]

    def quantile(self, share: float) -> float:
        """Duration that this share of the decisions did not exceed."""
        return self.seconds[min(int(share * len(self.seconds)), len(self.seconds) - 1)]


async def measure(policy: PolicyName, workers: int, decisions: int, seed: int) -> Durations:
    """Choose for many turns, all with a handle, among workers that are all busy.

    A decision is everything from the conversation's facts to the names of both
    workers. Half of the workers run each leg.
    """
    rng = Random(seed)
    prefill = workers // 2
    fleet = make_fleet(prefill, workers - prefill)
    now = [1000.0]
    seconds = []
    async with router_view(fleet, policy, clock=lambda: now[0], rng=rng.random) as (pool, routes):
        with ExitStack() as busy:
            _teach(pool, routes, rng, now)
            for facts, worker_id in _load(pool, rng):
                busy.enter_context(pool.use(worker_id, facts))
            by_id = {worker.worker_id: worker for worker in fleet}
            holders = [worker.worker_id for worker in fleet if worker.role == DECODE]
            gc.collect()
            gc.disable()
            try:
                for _ in range(decisions + _WARM_UP):
                    told = Conversation(rng.choice(holders), 4000, "", rng.getrandbits(60))
                    started = time.thread_time_ns()
                    facts = routes.facts_of(MODEL, 5000, told)
                    decode = routes.decode(MODEL, facts)
                    routes.prefill(MODEL, facts, decode=decode, holder=by_id[told.holder_id])
                    seconds.append((time.thread_time_ns() - started) / 1e9)
            finally:
                gc.enable()
    return Durations(policy, workers, sorted(seconds[_WARM_UP:]))


def _teach(pool: WorkerPool, routes: Routes, rng: Random, now: list[float]) -> None:
    """Give every worker figures of its own."""
    for candidate in [*pool.candidates(MODEL, PREFILL), *pool.candidates(MODEL, DECODE)]:
        for _ in range(4):
            facts = TurnFacts(prompt_tokens=rng.randrange(500, 20_000))
            with pool.use(candidate.worker_id, facts):
                now[0] += facts.prompt_tokens * rng.uniform(90e-6, 110e-6)
                if candidate.worker.role == PREFILL:
                    tokens = facts.prompt_tokens
                    report = common_pb2.PrefillReport(
                        prompt_tokens=tokens, recomputed_tokens=tokens
                    )
                    routes.learn(MODEL, candidate.worker_id, facts, report)
                else:
                    pool.first_chunk(candidate.worker_id, facts)


def _load(pool: WorkerPool, rng: Random) -> Iterator[tuple[TurnFacts, str]]:
    """Legs in flight: up to four on prefill workers, up to forty on decode workers."""
    for role, most in ((PREFILL, 4), (DECODE, 40)):
        for candidate in pool.candidates(MODEL, role):
            for _ in range(rng.randrange(most + 1)):
                yield TurnFacts(prompt_tokens=rng.randrange(500, 20_000)), candidate.worker_id
