"""The engine core: step after step, as long as there is something to do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from services.sim.blocks import BlockPool
from services.sim.connector import Connector, Load, Remote, make_connector, remote_of
from services.sim.faults import FaultKind, first
from services.sim.kv import KvReader, start_digest
from services.sim.leases import Leases
from services.sim.link import Link
from services.sim.model import SimModel
from services.sim.peers import Peers, SideChannel
from services.sim.pins import Pin, PinTable
from services.sim.scheduler import Scheduler, Step
from services.sim.sequence import Ending, Output, Phase, Sequence
from services.sim.spec import EngineSpec, Identity, LoadFailurePolicy
from services.sim.stats import EngineStats
from services.sim.tokenizer import EOS_ID
from services.sim.transfers import LoadResult, Transfers
from services.worker.clock import Clock
from services.worker.race import wait_or_sleep
from services.worker.tasks import BackgroundTasks

_CATCH_UP_SECONDS = 0.1
"""How far steps may lag behind their schedule, as timers are late and other
engines share the core, before the lag is forgotten."""

EventSink = Callable[[dict[str, Any], float], None]
"""Takes an event for the sidecar and how many seconds late it shall be."""


class EngineCore:
    """Scheduler, blocks, pins and transfers of one life of one engine.

    Args:
        spec: the engine.
        identity: this life.
        peers: the other engines.
        clock: the machine's clock.
        tasks: runs transfers.
        send_event: takes events for the sidecar.
        link: how fast other engines' blocks are read; the profile's if omitted.
    """

    def __init__(
        self,
        spec: EngineSpec,
        identity: Identity,
        *,
        peers: Peers,
        clock: Clock,
        tasks: BackgroundTasks,
        send_event: EventSink,
        link: Link | None = None,
    ) -> None:
        self.spec = spec
        self.identity = identity
        self.stats = EngineStats()
        self.pool = BlockPool(spec.num_blocks, spec.block_size, spec.freed_reads)
        self.pins = PinTable(self.pool, lambda freed: self.leases.freed(freed))
        self.leases = Leases(self.pins, self.now, lambda event: send_event(event, 0.0))
        self._clock = clock
        self._send_event = send_event
        self._connector: Connector = make_connector(spec, identity)
        self._model = SimModel(spec.answer_tokens)
        self._start = start_digest(spec.model)
        self._transfers = Transfers(
            spec, peers, self.pool, self.stats, clock, self.now, tasks, link or Link()
        )
        self.scheduler = Scheduler(spec, self.pool, self._connector, self.stats, self._start_load)
        self.side_channel = SideChannel(spec, identity, self.pool, self.pins, self.now, self.wake)
        self._wake = asyncio.Event()
        self._due = 0.0
        self._renew_at = 0.0
        self._press_at: float | None = None
        self._pulls: dict[str, Remote] = {}  # by the request that reads

    def now(self) -> float:
        """Time on the engine's own clock."""
        return self._clock.monotonic() + self.identity.clock_offset

    def wake(self) -> None:
        """Something has changed that may let a step run."""
        self._wake.set()

    def reader(self) -> KvReader:
        """A view of no blocks yet, for a new sequence."""
        return KvReader(self.pool.memory, self.spec.block_size, self._start)

    def submit(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn."""
        self.scheduler.waiting.append(sequence)
        self.wake()

    def abort(self, sequence: Sequence) -> None:
        """End a sequence that nobody wants any more. Ended ones are left alone."""
        if not sequence.ended:
            self._finish(sequence, Ending.ABORT)

    def reject(self, params: dict[str, Any] | None) -> None:
        """A request was refused before it got here: its prefill engine must not
        keep blocks for it."""
        if params and params.get("do_remote_prefill") and (remote := remote_of(params)):
            load = Load("rejected", remote, [], is_readback=False)
            self._transfers.start(load, (), lambda result: None)

    def release(self, request_ids: list[str]) -> None:
        """Free the pins of finished requests, as the sidecar asks."""
        self.pins.release(request_ids, self.now())
        self.wake()

    def snapshot(self) -> dict[str, Any]:
        """The event that tells the sidecar what is retained now."""
        return self.leases.snapshot()

    def renew(self, leases: list[tuple[str, float]]) -> None:
        """Keep pins for so many seconds from now, as the sidecar asks."""
        self.leases.renew(leases)
        self.wake()

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; False while blocks are in use."""
        self.pins.expire(self.now())
        return self.pool.reset_cache()

    async def run(self) -> None:
        """Run steps until cancelled. Without work this waits and costs nothing."""
        while True:
            self._wake.clear()
            self.pins.expire(self.now())
            self._renew_leases()
            step = self.scheduler.plan()
            self._press_at = self.leases.press(self.scheduler.lacking_blocks)
            if step.work:
                await self._pace(self._duration(step))
                self._apply(step)
            else:
                await wait_or_sleep(self._wake, self._clock, self._until_change())
                self._due = 0.0

    def _duration(self, step: Step) -> float:
        prefills = [
            (tokens, sequence.computed)
            for sequence, tokens in step.work
            if sequence.computed + tokens <= sequence.prompt_tokens
        ]
        decodes = [
            sequence.computed
            for sequence, tokens in step.work
            if sequence.computed + tokens > sequence.prompt_tokens
        ]
        return self.spec.profile.step(prefills, decodes) * self.spec.time_scale

    async def _pace(self, seconds: float) -> None:
        """Sleep so that steps keep their schedule on average."""
        now = self._clock.monotonic()
        self._due = max(self._due, now - _CATCH_UP_SECONDS if self._due else now) + seconds
        await self._clock.sleep(max(self._due - now, 0.0))

    def _apply(self, step: Step) -> None:
        for sequence, tokens in step.work:
            if sequence.phase is not Phase.RUNNING:
                continue  # aborted during the step
            start = sequence.computed
            sequence.kv.write(sequence.blocks, sequence.tokens[start : start + tokens])
            sequence.computed = start + tokens
            self.scheduler.cache_complete(sequence)
            if sequence.computed == len(sequence.tokens):
                self._sample(sequence)

    def _sample(self, sequence: Sequence) -> None:
        sampling = sequence.sampling
        digest = sequence.kv.digest(sequence.blocks)
        may_end = not sampling.ignore_eos and sequence.answer_tokens >= sampling.min_tokens
        if sequence.grammar is not None:
            sequence.script = list(reversed(sequence.grammar(digest)))
            sequence.grammar = None
        token = (
            sequence.script.pop()
            if sequence.script
            else self._model.next_token(digest, variation=sampling.variation, may_end=may_end)
        )
        sequence.tokens.append(token)
        self._count_token(sequence)
        ending, stop_token = self._ending(sequence, token)
        if ending is None:
            sequence.channel.put(Output(sequence.choice, token, digest))
        else:
            self._finish(sequence, ending, token=token, digest=digest, stop_token=stop_token)

    def _ending(self, sequence: Sequence, token: int) -> tuple[Ending | None, int | None]:
        sampling = sequence.sampling
        if token == EOS_ID and not sampling.ignore_eos:
            return Ending.STOP, None
        if token in sampling.stop_token_ids and sequence.answer_tokens > sampling.min_tokens:
            return Ending.STOP, token
        if (
            sequence.answer_tokens >= sampling.max_tokens
            or len(sequence.tokens) >= self.spec.max_model_len
        ):
            return Ending.LENGTH, None
        return None, None

    def _finish(
        self,
        sequence: Sequence,
        ending: Ending,
        *,
        token: int | None = None,
        digest: bytes = b"",
        stop_token: int | None = None,
    ) -> None:
        loading = sequence.phase is Phase.LOADING
        self.scheduler.remove(sequence)
        outcome = self._connector.finished(sequence, ending, self.now())
        if outcome.keep_until is not None:
            deadline = outcome.keep_until if sequence.tracked else None
            self.pins.add(
                Pin(
                    sequence.request_id,
                    sequence.blocks,
                    deadline,
                    turn_id=outcome.event["turn_id"] if outcome.event else "",
                    num_tokens=sequence.computed,
                    ended_at=self.now(),
                )
            )
        elif not loading:
            # Blocks that are being filled are freed when the transfer has ended.
            self.pool.release(sequence.blocks)
        if outcome.notify is not None:
            self._start_load(sequence, outcome.notify)
        if outcome.event is not None and not first(sequence.faults, FaultKind.NO_EVENT):
            late = first(sequence.faults, FaultKind.DELAY_EVENT)
            self._send_event(outcome.event, late.seconds if late else 0.0)
        self._count_finished(sequence, ending)
        sequence.channel.put(
            Output(sequence.choice, token, digest, ending, stop_token, outcome.reply)
        )
        self.wake()

    def _start_load(self, sequence: Sequence, load: Load) -> None:
        if load.local_blocks and not load.is_readback:
            self._pulls[load.request_id] = load.remote
        if load.local_blocks and sequence.report is not None:
            sequence.report.pull_started = self._clock.monotonic()
        self._transfers.start(
            load, sequence.faults, lambda result: self._load_done(sequence, load, result)
        )

    def _load_done(self, sequence: Sequence, load: Load, result: LoadResult) -> None:
        if not load.local_blocks:
            return
        self._pulls.pop(load.request_id, None)
        report = sequence.report
        if report is not None and report.pull_started is not None and result is LoadResult.DONE:
            report.pull_seconds = self._clock.monotonic() - report.pull_started
        if sequence.ended:
            self.pool.release(sequence.blocks)
        elif result is LoadResult.DONE:
            self.scheduler.loaded(sequence, succeeded=True)
        elif self.spec.load_failure_policy is LoadFailurePolicy.RECOMPUTE:
            self._connector.load_failed(sequence, expired=result is LoadResult.EXPIRED)
            self.scheduler.loaded(sequence, succeeded=False)
        else:
            self._finish(sequence, Ending.ERROR)
            self.pool.release(sequence.blocks)
        self.wake()

    def _renew_leases(self) -> None:
        """Keep blocks alive in other engines until requests here have read them."""
        now = self._clock.monotonic()
        if now < self._renew_at or not self.spec.renews_leases:
            return
        self._renew_at = now + self.spec.kv_lease_seconds / 6
        self._transfers.renew([*self._unread(), *self._pulls.values()])

    def _unread(self) -> Iterator[Remote]:
        for sequence in self.scheduler.waiting:
            params = sequence.params
            if params and params.get("do_remote_prefill") and (remote := remote_of(params)):
                yield remote

    def _until_change(self) -> float | None:
        """Seconds until something is due by itself; None: nothing is."""
        moments = []
        if self.scheduler.num_waiting and self.spec.renews_leases:
            moments.append(self._renew_at)
        if (deadline := self.pins.next_deadline()) is not None:
            moments.append(deadline - self.identity.clock_offset)
        if self._press_at is not None:
            moments.append(self._press_at - self.identity.clock_offset)
        if not moments:
            return None
        return max(min(moments) - self._clock.monotonic(), 0.0)

    def _count_token(self, sequence: Sequence) -> None:
        now = self._clock.monotonic()
        self.stats.generation_tokens += 1
        if sequence.first_token_at is None:
            sequence.first_token_at = now
            self.stats.prompt_tokens += sequence.prompt_tokens
            self.stats.prompt_tokens_cached += sequence.cached_tokens or 0
            self.stats.time_to_first_token_seconds.observe(now - sequence.arrived_at)
        else:
            self.stats.inter_token_latency_seconds.observe(now - sequence.last_token_at)
        sequence.last_token_at = now

    def _count_finished(self, sequence: Sequence, ending: Ending) -> None:
        self.stats.request_success[ending] += 1
        if ending in (Ending.STOP, Ending.LENGTH):
            elapsed = self._clock.monotonic() - sequence.arrived_at
            self.stats.e2e_request_latency_seconds.observe(elapsed)
            self.stats.request_prompt_tokens.observe(sequence.prompt_tokens)
            self.stats.request_generation_tokens.observe(sequence.answer_tokens)
