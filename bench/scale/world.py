"""Routers before a fleet of engines in virtual time. The choices are the real ones.

Each router has its own pool, figures and view, and sees only its own turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from random import Random

from bench.scale.engines import Conversation, Decode, Prefill, Prefilled
from bench.scale.fleet import MODEL, make_fleet, router_view
from bench.scale.timeline import Timeline
from bench.scale.workload import Script, Turn, Workload, scripts
from kvloop.common.v1 import common_pb2
from kvloop.durations import to_duration
from kvloop.kvmeta.v1 import registry_pb2
from services.router import routing
from services.router.policies import PolicyName
from services.router.policy import TurnFacts
from services.router.routing import Routes
from services.router.workers import WorkerPool
from services.sim.latency import PROFILES, Preset, Profile


@dataclass(frozen=True)
class Fleet:
    """What turns run on."""

    prefill: int = 40
    decode: int = 60
    routers: int = 4
    slots: int = 32
    """Turns that a decode engine runs at once."""
    slow_share: float = 0.0
    """Share of the prefill engines that compute at half the speed."""
    stalled: int = 0
    """Decode engines that stand still for a minute in the middle."""
    size_error: float = 0.1
    """By how much a router's guess of a prompt's length is off, one sigma."""


@dataclass
class Outcome:
    """What came of one run."""

    ttft: list[float] = field(default_factory=list)
    followups: int = 0
    moved: int = 0
    """Follow-ups that ran on another decode engine than the turn before."""
    reusable: int = 0
    """Tokens of prompts that an earlier turn has computed."""
    reused: int = 0
    """Those of them that were not computed again."""
    prefill_use: float = 0.0
    """Share of the time that prefill engines computed."""

    def quantile(self, share: float) -> float:
        """TTFT below which that share of the turns was, in seconds."""
        ordered = sorted(self.ttft)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]

    @property
    def hit_rate(self) -> float:
        """Share of the reusable tokens that were not computed again."""
        return self.reused / self.reusable if self.reusable else 0.0


async def run(policy: PolicyName, fleet: Fleet, workload: Workload, seed: int) -> Outcome:
    """Play all conversations under one policy."""
    timeline, rng = Timeline(), Random(seed)
    async with AsyncExitStack() as stack:
        registered = make_fleet(fleet.prefill, fleet.decode)
        routers = [
            await stack.enter_async_context(
                router_view(registered, policy, clock=timeline.clock, rng=rng.random)
            )
            for _ in range(fleet.routers)
        ]
        world = _World(timeline, fleet, workload, registered, routers, rng)
        return world.run(scripts(workload, seed))


class _World:
    def __init__(
        self,
        timeline: Timeline,
        fleet: Fleet,
        workload: Workload,
        registered: Sequence[registry_pb2.Worker],
        routers: Sequence[tuple[WorkerPool, Routes]],
        rng: Random,
    ) -> None:
        profile = PROFILES[Preset.QWEN3_32B_H200]
        middle = workload.seconds / 2
        self._timeline = timeline
        self._fleet = fleet
        self._workers = {worker.worker_id: worker for worker in registered}
        self._routers = routers
        self._rng = rng
        self._prefill = dict(_prefill_engines(timeline, profile, fleet))
        self._decode = {
            f"decode-{place}": Decode(
                timeline,
                profile,
                slots=fleet.slots,
                retained_tokens=profile.kv_capacity_tokens // 2,
                stalls=(middle, middle + 60) if place < fleet.stalled else None,
            )
            for place in range(fleet.decode)
        }
        self._names = {engine: name for name, engine in self._decode.items()}
        self._seconds = workload.seconds
        self._outcome = Outcome()

    def run(self, played: Iterator[Script]) -> Outcome:
        for number, script in enumerate(played):
            talk = _Talk(Conversation(number), script.turns, self._rng.getrandbits(64))
            self._timeline.after(script.start, lambda talk=talk: self._turn(talk))  # type: ignore[misc]
        self._timeline.run()
        busy = sum(engine.busy_seconds for engine in self._prefill.values())
        self._outcome.prefill_use = busy / len(self._prefill) / self._seconds
        return self._outcome

    def _turn(self, talk: _Talk) -> None:
        pool, routes = self._rng.choice(self._routers)
        known, facts = talk.conversation, self._facts(talk, routes)
        turn, outcome, started = talk.turns[talk.next], self._outcome, self._timeline.now
        before, prompt = known.tokens, known.tokens + turn.new_tokens
        holder = self._workers.get(facts.holder_id)
        decode = routes.decode(MODEL, facts)
        prefill = routes.prefill(MODEL, facts, decode=decode, holder=holder)
        assert prefill is not None
        outcome.followups += talk.next > 0
        outcome.moved += talk.next > 0 and talk.last != decode.worker_id
        talk.next, talk.last = talk.next + 1, decode.worker_id
        engine = self._decode[decode.worker_id]
        reads = prompt - (facts.held_tokens if decode is holder else 0)
        leg = ExitStack()
        leg.enter_context(pool.use(prefill.worker_id, facts))

        def prefilled(done: Prefilled) -> None:
            report = _report(done, facts.held_tokens)
            routes.learn(MODEL, prefill.worker_id, facts, report)
            leg.close()
            outcome.reusable += before
            outcome.reused += min(done.cached + done.pulled, before)
            leg.enter_context(pool.use(decode.worker_id, facts))
            engine.run(reads, prompt, turn.answer_tokens, first=first, end=ended)

        def first() -> None:
            pool.first_chunk(decode.worker_id, facts)
            outcome.ttft.append(self._timeline.now - started)

        def ended() -> None:
            leg.close()
            known.tokens = prompt + turn.answer_tokens
            engine.retain(known)
            if talk.next < len(talk.turns):
                pause = talk.turns[talk.next].pause_seconds
                self._timeline.after(pause, lambda: self._turn(talk))
            else:
                known.let_go()

        self._prefill[prefill.worker_id].run(known, prompt, prefilled)

    def _facts(self, talk: _Talk, routes: Routes) -> TurnFacts:
        """What a router would know of the conversation's next turn."""
        known = talk.conversation
        if known.expires < self._timeline.now:
            known.let_go()
        prompt = known.tokens + talk.turns[talk.next].new_tokens
        guess = int(prompt * self._rng.gauss(1.0, self._fleet.size_error))
        holder_id = self._names[known.holder] if known.holder is not None else ""
        told = routing.Conversation(holder_id, known.held, talk.last, talk.affinity)
        return routes.facts_of(MODEL, max(guess, 1), told)


@dataclass
class _Talk:
    conversation: Conversation
    turns: Sequence[Turn]
    affinity: int
    next: int = 0
    last: str = ""
    """Decode worker of the turn before."""


def _report(done: Prefilled, held: int) -> common_pb2.PrefillReport:
    report = common_pb2.PrefillReport(
        prompt_tokens=done.prompt,
        proven_tokens=held,
        cached_tokens=done.cached,
        pulled_tokens=done.pulled,
        recomputed_tokens=done.computed,
    )
    if done.expected_pull:
        report.expected_pull.CopyFrom(to_duration(done.expected_pull))
        report.expected_recompute.CopyFrom(to_duration(done.expected_recompute))
    if done.pulled:
        report.pull_duration.CopyFrom(to_duration(done.pull_seconds))
    return report


def _prefill_engines(
    timeline: Timeline, profile: Profile, fleet: Fleet
) -> Iterator[tuple[str, Prefill]]:
    slow = round(fleet.slow_share * fleet.prefill)
    for place in range(fleet.prefill):
        yield (
            f"prefill-{place}",
            Prefill(
                timeline,
                profile,
                slowness=2.0 if place < slow else 1.0,
                cache_tokens=profile.kv_capacity_tokens,
            ),
        )
