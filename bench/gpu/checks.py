"""What must hold on CUDA as it does on a CPU: proof, renewal and release."""

from __future__ import annotations

import asyncio
import random
import re
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field

from kvloop.bench.turns import TurnRequest, TurnResult, TurnRunner
from kvloop.durations import to_seconds
from kvloop.inventory import list_pins

_USAGE = re.compile(r"^vllm:kv_cache_usage_perc(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_FREED_SECONDS = 15.0
_LEASES = 2.25
"""Leases after which a conversation comes back: its blocks must have been renewed."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class _Edit:
    """A second turn whose history is not what decode holds."""

    name: str
    prompt: list[int]
    same: int
    """Leading tokens that it shares with what decode holds."""


async def check_proof(turns: TurnRunner, source: random.Random, name: str) -> list[Check]:
    """Edited histories: only what is proven is pulled, and the answer is the recomputed one.

    The engine must compute in float32, so that answers can be compared.
    """
    checks = []
    message = _tokens(source, 200)
    for number, at in enumerate(("whole", "answer", "history", "first")):
        conversation = f"{name}-{at}"
        first = _tokens(source, 1500)
        opening = TurnRequest(conversation, first, 64, reuse=True, last=False)
        said = list((await turns.run(opening)).token_ids)
        edit = _edits(first, said, message)[number]
        pulled = await turns.run(TurnRequest(conversation, edit.prompt, 32, True, True))
        fresh = await turns.run(TurnRequest(f"{conversation}-fresh", edit.prompt, 32, False, True))
        await turns.end(conversation)
        checks.append(_judge(edit, pulled, fresh))
    return checks


@dataclass
class RenewalCheck:
    """What a conversation left on decode outlives the engine's lease.

    Attributes:
        turns: on an engine in float32, whose lease is `lease_seconds`.
        kvmeta: host:port of the ledger, which tells how long the engine keeps the blocks.
        lease_seconds: for which the engine keeps them unless they are renewed.
        source: of tokens.
        name: of the conversation.
        clock: monotonic seconds.
    """

    turns: TurnRunner
    kvmeta: str
    lease_seconds: float
    source: random.Random
    name: str
    clock: Callable[[], float]
    _history: list[int] = field(init=False)
    _began: float = field(init=False)

    async def begin(self) -> None:
        """Take the first turn. Other turns may follow before `finish`."""
        first = _tokens(self.source, 1500)
        opening = TurnRequest(self.name, first, 64, reuse=True, last=False)
        said = (await self.turns.run(opening)).token_ids
        self._history = [*first, *said]
        self._began = self.clock()

    async def finish(self) -> Check:
        """Wait until the lease is long over, and take the second turn."""
        wait = self._began + _LEASES * self.lease_seconds - self.clock()
        await asyncio.sleep(max(wait, 0.0))
        pins = await asyncio.to_thread(lambda: list(list_pins(self.kvmeta)))
        left = [
            to_seconds(pin.engine_remaining)
            for pin in pins
            if to_seconds(pin.age) > self.lease_seconds
        ]
        seconds = self.clock() - self._began
        prompt = [*self._history, *_tokens(self.source, 200)]
        pulled = await self.turns.run(TurnRequest(self.name, prompt, 32, True, True))
        fresh = await self.turns.run(TurnRequest(f"{self.name}-fresh", prompt, 32, False, True))
        await self.turns.end(self.name)
        equal, verdict = _compared(pulled, fresh)
        kept = f"{max(left, default=0.0):.0f} s"
        detail = (
            f"lease of {self.lease_seconds:g} s, {seconds:.0f} s old, kept for {kept} more; "
            f"then {pulled.pulled_tokens} of {len(prompt)} tokens pulled, {verdict}"
        )
        renewed = 0 < max(left, default=0.0) <= self.lease_seconds
        return Check("renewal", renewed and pulled.pulled_tokens > 1000 and equal, detail)


async def check_release(
    turns: TurnRunner, decode_url: str, source: random.Random, name: str, clock: Callable[[], float]
) -> Check:
    """A conversation that ends gives its blocks on decode up within seconds."""
    opening = TurnRequest(name, _tokens(source, 4000), 32, reuse=True, last=False)
    await turns.run(opening)
    await asyncio.sleep(1.0)
    held = await asyncio.to_thread(_kv_usage, decode_url)
    began = clock()
    await turns.end(name)
    usage = held
    while usage > 0 and clock() - began < _FREED_SECONDS:
        await asyncio.sleep(0.05)
        usage = await asyncio.to_thread(_kv_usage, decode_url)
    seconds = clock() - began
    if usage > 0:
        # An idle engine may not report any more; another request makes it.
        await turns.run(TurnRequest(f"{name}-nudge", _tokens(source, 20), 4, False, True))
        usage = await asyncio.to_thread(_kv_usage, decode_url)
    detail = f"KV usage of decode {held:.2%} -> {usage:.2%} in {seconds:.2f} s"
    return Check("release", held > 0 and usage < held / 10, detail)


def _edits(first: list[int], said: list[int], message: list[int]) -> list[_Edit]:
    middle, cut = 700, 32
    return [
        _Edit("the history as it was", [*first, *said, *message], len(first) + len(said) - 1),
        _Edit("the answer's middle removed", [*first, *said[:cut], *message], len(first) + cut),
        _Edit(
            "a token of the first message changed",
            [*first[:middle], first[middle] + 1, *first[middle + 1 :], *said, *message],
            middle,
        ),
        _Edit("another first message", [first[0] + 1, *first[1:], *said, *message], 0),
    ]


def _judge(edit: _Edit, pulled: TurnResult, fresh: TurnResult) -> Check:
    block_slack = 128
    proven = edit.same - block_slack <= pulled.pulled_tokens <= edit.same
    equal, verdict = _compared(pulled, fresh)
    detail = (
        f"{edit.same} of {len(edit.prompt)} tokens are the same, {pulled.pulled_tokens} pulled "
        f"(miss reason {pulled.miss_reason}); {verdict}"
    )
    return Check(edit.name, proven and equal, detail)


def _compared(pulled: TurnResult, fresh: TurnResult) -> tuple[bool, str]:
    """Whether two answers are the same, and how to say it."""
    equal = pulled.token_ids == fresh.token_ids
    return equal, f"answer {'equals' if equal else 'DIFFERS from'} the recomputed one"


def _kv_usage(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        return max((float(found) for found in _USAGE.findall(answer.read().decode())), default=0.0)


def _tokens(source: random.Random, count: int) -> list[int]:
    return [source.randrange(10, 4000) for _ in range(count)]
