"""Measures the way of a long prompt: python -m bench.path [TOKENS ...]. About 45 s."""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time

from rich.console import Console

from bench.path.awake import processors_awake
from bench.path.hops import Hop, grpc_hop, measure, tcp_hop
from bench.path.steps import Step, chat_steps, token_steps

_console = Console(highlight=False, markup=False)
_ROUNDS = 60
_HOPS = 30
_IDLE_SECONDS = 0.15
_BODY_BYTES = (500, 205_000)


def main() -> None:
    """Print a table of steps for each length, then one of hops."""
    for num_tokens in [int(text) for text in sys.argv[1:]] or [8192, 32768]:
        for kind, steps in (("token ids", token_steps), ("chat", chat_steps)):
            _console.print(f"\n{num_tokens:,} tokens, {kind}")
            _show(steps(num_tokens, random.Random(1)))
    asyncio.run(_hops())


def _show(steps: list[Step]) -> None:
    added = 0.0
    for step in steps:
        seconds = _median(step)
        before_first_token = not step.in_bare and "behind" not in step.what
        added += seconds if before_first_token else 0.0
        mark = "" if before_first_token else "  (bare too)" if step.in_bare else "  (later)"
        _console.print(f"  {step.where:16} {step.what:36} {seconds * 1e3:7.3f} ms{mark}")
    _console.print(f"  {'added before the first token':53} {added * 1e3:7.3f} ms")


def _median(step: Step) -> float:
    taken = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        step.run()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


async def _hops() -> None:
    _console.print(
        f"\none hop, ms: back to back, after {_IDLE_SECONDS} s of idle time, and so with "
        "processors kept awake"
    )
    for name, opening in (("gRPC", grpc_hop), ("TCP", tcp_hop)):
        async with opening() as hop:
            for size in _BODY_BYTES:
                shown = [await _shown(hop, size, idle) for idle in (0.0, _IDLE_SECONDS)]
                with processors_awake() as awake:
                    shown.append(await _shown(hop, size, _IDLE_SECONDS) if awake else "      -")
                _console.print(f"  {name:5} {size:8,} bytes {'  '.join(shown)}")


async def _shown(hop: Hop, size: int, idle_seconds: float) -> str:
    return f"{await measure(hop, size, idle_seconds, time.perf_counter, _HOPS) * 1e3:7.2f}"


if __name__ == "__main__":
    main()
