"""Which sequences run in the next step, and on which blocks. No time passes here.

Follows vLLM's scheduler: running sequences first, then waiting ones in order of
arrival, as far as blocks, sequence slots and the token budget of a step reach. A
prompt gets all of its blocks when it is admitted; a running sequence that finds
no block for its next token makes the one admitted last give its blocks back and
wait again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from services.sim.blocks import BlockPool, extend_hashes
from services.sim.connector import Connector, Load
from services.sim.sequence import Phase, Sequence
from services.sim.spec import EngineSpec
from services.sim.stats import EngineStats


@dataclass
class Step:
    """What one step computes."""

    work: list[tuple[Sequence, int]] = field(default_factory=list)
    """(sequence, tokens to compute)."""
    tokens: int = 0

    def add(self, sequence: Sequence, tokens: int) -> None:
        """Compute that many tokens of a sequence."""
        self.work.append((sequence, tokens))
        self.tokens += tokens


class Scheduler:
    """Waiting, loading and running sequences of one engine.

    Args:
        spec: the engine.
        pool: its blocks.
        connector: decides what to pull.
        stats: counts.
        start_load: called with each read to start.
    """

    def __init__(
        self,
        spec: EngineSpec,
        pool: BlockPool,
        connector: Connector,
        stats: EngineStats,
        start_load: Callable[[Sequence, Load], None],
    ) -> None:
        self._spec = spec
        self._pool = pool
        self._connector = connector
        self._stats = stats
        self._start_load = start_load
        self.waiting: deque[Sequence] = deque()
        self.loading: dict[str, Sequence] = {}
        self.running: list[Sequence] = []
        self.lacking_blocks = 0
        """Blocks that the last step would have needed more."""

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for capacity or for blocks from elsewhere."""
        return len(self.waiting) + len(self.loading)

    @property
    def has_work(self) -> bool:
        """True if a step might do something."""
        return bool(self.waiting or self.running)

    def plan(self) -> Step:
        """Choose the work of the next step and give it its blocks."""
        step = Step()
        self.lacking_blocks = 0
        preempted = self._stats.num_preemptions
        for sequence in list(self.running):
            if sequence.phase is not Phase.RUNNING:
                continue  # gave its blocks back a moment ago
            budget = self._spec.max_num_batched_tokens - step.tokens
            tokens = min(len(sequence.tokens) - sequence.computed, budget)
            if tokens > 0 and self._grow(sequence, sequence.computed + tokens):
                step.add(sequence, tokens)
        if self._stats.num_preemptions > preempted:
            return step  # who gave blocks back shall not take them again at once
        while self.waiting and len(self.running) < self._spec.max_num_seqs:
            budget = self._spec.max_num_batched_tokens - step.tokens
            if budget <= 0 or not self._admit(self.waiting[0]):
                break
            sequence = self.waiting.popleft()
            if sequence.phase is Phase.LOADING:
                self.loading[sequence.request_id] = sequence
                continue
            sequence.phase = Phase.RUNNING
            self.running.append(sequence)
            step.add(sequence, min(len(sequence.tokens) - sequence.computed, budget))
        return step

    def loaded(self, sequence: Sequence, *, succeeded: bool) -> None:
        """Blocks have come from elsewhere, or not: let the sequence be admitted."""
        del self.loading[sequence.request_id]
        if succeeded:
            self.cache_complete(sequence)
            # The last token is always computed here, to sample from it.
            sequence.computed = min(sequence.computed, len(sequence.tokens) - 1)
            sequence.loaded = True
        else:
            self._pool.release(sequence.blocks)
            sequence.blocks = []
            sequence.computed = 0
            sequence.num_cached_blocks = 0
        sequence.phase = Phase.WAITING
        self.waiting.appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended. Its blocks stay where they are."""
        if sequence.phase is Phase.RUNNING:
            self.running.remove(sequence)
        elif sequence.phase is Phase.WAITING:
            self.waiting.remove(sequence)
        elif sequence.phase is Phase.LOADING:
            self.loading.pop(sequence.request_id)
        sequence.phase = Phase.ENDED

    def cache_complete(self, sequence: Sequence) -> None:
        """Let the prefix cache find blocks that have become complete."""
        complete = sequence.computed // self._spec.block_size
        if complete == sequence.num_cached_blocks:
            return
        extend_hashes(
            sequence.hashes,
            sequence.tokens[: complete * self._spec.block_size],
            self._spec.block_size,
            sequence.salt,
        )
        for index in range(sequence.num_cached_blocks, complete):
            self._pool.cache(sequence.blocks[index], sequence.hashes[index])
        sequence.num_cached_blocks = complete

    def _admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence its blocks. False: there are not enough."""
        if sequence.loaded:
            if not self._take(sequence, self._blocks_for(len(sequence.tokens))):
                return False
            sequence.loaded = False
            sequence.kv.load(sequence.blocks, sequence.computed)
            return True
        cached = self._find_cached(sequence)
        computed = len(cached) * self._spec.block_size
        external = self._connector.matched_tokens(sequence, computed)
        covered = computed + external if external else len(sequence.tokens)
        fresh = self._blocks_for(covered) - len(cached)
        unused = sum(1 for block in cached if not self._pool.users(block))
        if fresh + unused > self._pool.num_free:
            self.lacking_blocks = fresh + unused - self._pool.num_free
            return False
        self._pool.share(cached)
        sequence.blocks = [*cached, *(self._pool.allocate(fresh) or ())]
        sequence.computed = computed + external
        sequence.num_cached_blocks = len(cached)
        self._count(sequence, computed, external)
        load = self._connector.allocated(sequence, len(cached), external)
        if external:
            # Without a load the sequence waits for ever: vLLM does so with params
            # that lack something.
            sequence.phase = Phase.LOADING
        else:
            sequence.kv.load(sequence.blocks, computed)
        if load is not None:
            self._start_load(sequence, load)
        return True

    def _find_cached(self, sequence: Sequence) -> list[int]:
        """Cached blocks of the longest prefix that leaves a token to compute."""
        size = self._spec.block_size
        extend_hashes(sequence.hashes, sequence.tokens, size, sequence.salt)
        usable = (len(sequence.tokens) - 1) // size
        return self._pool.find_cached(sequence.hashes[:usable])

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        """Blocks for a running sequence; others may lose theirs."""
        while not self._take(sequence, self._blocks_for(tokens)):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _take(self, sequence: Sequence, total: int) -> bool:
        missing = total - len(sequence.blocks)
        if missing <= 0:
            return True
        blocks = self._pool.allocate(missing)
        if blocks is None:
            self.lacking_blocks = missing - self._pool.num_free
            return False
        sequence.blocks += blocks
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._stats.num_preemptions += 1
        self.running.remove(sequence)
        self._pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = 0
        sequence.num_cached_blocks = 0
        sequence.phase = Phase.WAITING
        self.waiting.appendleft(sequence)

    def _count(self, sequence: Sequence, cached: int, external: int) -> None:
        if sequence.cached_tokens is not None:
            sequence.cached_tokens = cached + external
            return
        sequence.cached_tokens = cached + external
        self._stats.prefix_cache_queries += len(sequence.tokens)
        self._stats.prefix_cache_hits += cached
        self._stats.external_prefix_cache_queries += len(sequence.tokens) - cached
        self._stats.external_prefix_cache_hits += external

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._spec.block_size)
