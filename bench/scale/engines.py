"""Prefill and decode engines in virtual time: queues, prefix caches, retained KV.

Durations are those of the simulated engine's profiles (services/sim/latency.py).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from bench.scale.timeline import Timeline
from services.sim.latency import Profile

BLOCK_SIZE = 16
THRESHOLD = 64
"""kv_recompute_threshold."""
TTL_SECONDS = 480.0


@dataclass
class Conversation:
    """What is known of one conversation."""

    number: int
    tokens: int = 0
    """Prompts and answers so far."""
    holder: Decode | None = None
    """Engine that retains its KV."""
    held: int = 0
    """Tokens that it retains."""
    expires: float = 0.0
    """When it frees them."""

    def let_go(self) -> None:
        """Its KV has been read, or is given up."""
        if self.holder is not None:
            self.holder.free(self)


class TokenCache:
    """Least recently used conversations go first.

    Args:
        capacity: tokens.
        evicted: told of each conversation that had to go.
    """

    def __init__(self, capacity: int, evicted: Callable[[int], None] = lambda _: None) -> None:
        self._capacity = capacity
        self._evicted = evicted
        self._held: OrderedDict[int, int] = OrderedDict()
        self._total = 0

    def get(self, number: int) -> int:
        """Tokens held of that conversation."""
        return self._held.get(number, 0)

    def put(self, number: int, tokens: int) -> None:
        """Hold so many."""
        self.drop(number)
        self._held[number] = tokens
        self._total += tokens
        while self._total > self._capacity and len(self._held) > 1:
            oldest = next(iter(self._held))
            self.drop(oldest)
            self._evicted(oldest)

    def drop(self, number: int) -> None:
        """Hold nothing of it any more."""
        self._total -= self._held.pop(number, 0)


@dataclass(frozen=True)
class Prefilled:
    """What a prefill engine did with a prompt."""

    prompt: int
    cached: int
    pulled: int
    pull_seconds: float
    expected_pull: float
    """What pulling all that is retained and not cached takes."""
    expected_recompute: float
    """What computing it takes."""

    @property
    def computed(self) -> int:
        """Tokens that were computed."""
        return self.prompt - self.cached - self.pulled


class Prefill:
    """A prefill engine. It computes one prompt after the other, and pulls beside that.

    Args:
        timeline: the time.
        profile: how fast it is.
        slowness: computing takes this many times as long as in the profile.
        cache_tokens: size of its prefix cache.
    """

    def __init__(
        self, timeline: Timeline, profile: Profile, *, slowness: float, cache_tokens: int
    ) -> None:
        self._timeline = timeline
        self._profile = profile
        self._slowness = slowness
        self._cache = TokenCache(cache_tokens)
        self._free_at = 0.0
        self.busy_seconds = 0.0

    def run(self, talk: Conversation, prompt: int, done: Callable[[Prefilled], None]) -> None:
        """A prefill leg; pulls what the conversation's holder has, if that is faster."""
        cached = min(self._cache.get(talk.number), prompt - 1)
        wanted = min(talk.held, prompt - 1) - cached
        pulled, pull, compute = 0, 0.0, 0.0
        if wanted >= THRESHOLD:
            pull = self._profile.transfer(-(-wanted // BLOCK_SIZE), BLOCK_SIZE)
            compute = self._compute(cached, wanted)
            pulled = wanted if pull <= compute else 0
        result = Prefilled(prompt, cached, pulled, pull if pulled else 0.0, pull, compute)
        talk.let_go()
        ready = self._profile.request_overhead(prompt) + result.pull_seconds
        self._timeline.after(ready, lambda: self._queue(talk, result, done))

    def _queue(
        self, talk: Conversation, result: Prefilled, done: Callable[[Prefilled], None]
    ) -> None:
        seconds = self._compute(result.cached + result.pulled, result.computed)
        now = self._timeline.now
        self._free_at = max(self._free_at, now) + seconds
        self.busy_seconds += seconds
        self._cache.put(talk.number, result.prompt)
        self._timeline.after(self._free_at - now, lambda: done(result))

    def _compute(self, before: int, tokens: int) -> float:
        return self._slowness * self._profile.step([(tokens, before)], ())


class Decode:
    """A decode engine. It runs as many turns at once as it has slots.

    Args:
        timeline: the time.
        profile: how fast it is.
        slots: turns that run at once.
        retained_tokens: tokens that it may retain between turns.
        stalls: when it stands still, and until when.
    """

    def __init__(
        self,
        timeline: Timeline,
        profile: Profile,
        *,
        slots: int,
        retained_tokens: int,
        stalls: tuple[float, float] | None = None,
    ) -> None:
        self._timeline = timeline
        self._profile = profile
        self._slots = slots
        self._stalls = stalls
        self._talks: dict[int, Conversation] = {}
        self._retained = TokenCache(retained_tokens, self._evict)
        self._running = 0
        self._waiting: deque[Callable[[], None]] = deque()

    def run(
        self,
        reads: int,
        context: int,
        answer: int,
        *,
        first: Callable[[], None],
        end: Callable[[], None],
    ) -> None:
        """A decode leg.

        Args:
            reads: tokens to read from prefill.
            context: tokens of the prompt.
            answer: tokens of the answer.
            first: called at the first token.
            end: called at the end.
        """

        def start() -> None:
            self._running += 1
            step = self._profile.step((), [context] * self._running)
            self._timeline.after(self._stalled() + step, first)
            self._timeline.after(self._stalled() + step * answer, leave)

        def leave() -> None:
            self._running -= 1
            end()
            if self._waiting:
                self._waiting.popleft()()

        def arrive() -> None:
            if self._running < self._slots:
                start()
            else:
                self._waiting.append(start)

        blocks = -(-reads // BLOCK_SIZE)
        overhead = self._profile.request_overhead(context)
        self._timeline.after(overhead + self._profile.transfer(blocks, BLOCK_SIZE), arrive)

    def retain(self, talk: Conversation) -> None:
        """Hold a conversation's KV for its next turn."""
        talk.holder, talk.held = self, talk.tokens
        talk.expires = self._timeline.now + TTL_SECONDS
        self._talks[talk.number] = talk
        self._retained.put(talk.number, talk.tokens)

    def free(self, talk: Conversation) -> None:
        """Hold nothing of it any more."""
        self._retained.drop(talk.number)
        self._evict(talk.number)

    def _evict(self, number: int) -> None:
        talk = self._talks.pop(number, None)
        if talk is not None:
            talk.holder, talk.held = None, 0

    def _stalled(self) -> float:
        """How long it stands still from now on."""
        if self._stalls is None or not self._stalls[0] <= self._timeline.now < self._stalls[1]:
            return 0.0
        return self._stalls[1] - self._timeline.now
