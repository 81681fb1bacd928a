"""What is measured: cases, ways, and rounds that go from way to way."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import grpc

from bench.relay import prompts
from bench.relay.clients import (
    BareWay,
    Connection,
    GrpcWay,
    HttpWay,
    LegsWay,
    Timing,
    Way,
    connect,
    open_channel,
)
from bench.relay.processes import Fleet, cpu_seconds, resident_mib
from bench.relay.prompts import Prompt

WAYS = ("decode", "bare", "baseline", "http", "grpc", "legs", "alone")
"""decode: the decode engine alone. bare: both engines, leg by leg. baseline: through the
FastAPI relay. http, grpc: through kvloop, by either front. legs: sidecars and kvmeta that
cost next to nothing, leg by leg. alone: a router over these, by its HTTP front."""
_WARM_UPS = 8
"""Requests before each round, so that connections are there."""


@dataclass(frozen=True)
class Case:
    """One load.

    Attributes:
        name: for the table.
        prompt: what each request asks for.
        lanes: requests at once.
        requests: requests of each lane, one after the other.
        turns: turns of each conversation.
        apart_seconds: pause of random length before each request, at most; 0: lanes
            start in the same instant, and go on so.
    """

    name: str
    prompt: Prompt
    lanes: int
    requests: int
    turns: int = 1
    apart_seconds: float = 0.0


def all_cases() -> dict[str, Case]:
    """The cases, by name."""
    cases = [
        Case("one request", prompts.small(1), 1, 200),
        Case("8 slow streams", prompts.small(40, 20_000), 8, 4, apart_seconds=0.4),
        Case("8 slow streams at once", prompts.small(40, 20_000), 8, 4),
        Case("64 steady streams", prompts.small(60, 20_000), 64, 1),
        Case("64 fast streams", prompts.small(400), 64, 2),
        Case("64 fast streams, one by one", prompts.small(400, burst=1), 64, 1),
        Case("256 fast streams", prompts.small(400), 256, 1),
        Case("400 KB of messages", prompts.long_messages(4), 1, 30),
        Case("33k token ids", prompts.long_ids(4), 1, 15, turns=2),
    ]
    return {case.name: case for case in cases}


@dataclass(frozen=True)
class Round:
    """What one case took on one way, once.

    Attributes:
        case: its name.
        way: one of WAYS.
        ttfts: seconds to the first data, of every request's last turn.
        gaps: seconds between two arrivals.
        tokens: tokens of all answers.
        requests: requests answered.
        seconds: from first to last.
        cpu: seconds of processor time, by process.
        memory: MiB resident afterwards, by process.
    """

    case: str
    way: str
    ttfts: list[float]
    gaps: list[float]
    tokens: int
    requests: int
    seconds: float
    cpu: dict[str, float]
    memory: dict[str, float]

    @property
    def ttft(self) -> float:
        """The median, in seconds."""
        return statistics.median(self.ttfts)


class Runner:
    """Runs rounds on a fleet.

    Args:
        fleet: what runs.
        clock: monotonic seconds.
        source: of conversation names.
    """

    def __init__(self, fleet: Fleet, clock: Callable[[], float], source: random.Random) -> None:
        self._fleet = fleet
        self._clock = clock
        self._source = source

    async def round(self, case: Case, way: str) -> Round:
        """Run a case once on one way."""
        async with self._lanes(way, case.lanes) as lanes:
            short = replace(case.prompt, tokens=1, gap_us=0)
            for lane in lanes[:_WARM_UPS]:
                await lane.run(short.of(self._fresh()))
            pids = self._fleet.pids
            before = {name: cpu_seconds(pid) for name, pid in pids.items()}
            started = self._clock()
            done = await asyncio.gather(*(self._run_lane(case, lane) for lane in lanes))
            seconds = self._clock() - started
            cpu = {name: cpu_seconds(pid) - before[name] for name, pid in pids.items()}
        timings = [timing for lane in done for timing in lane]
        last_turns = timings[case.turns - 1 :: case.turns]
        gaps = [
            later - earlier
            for timing in timings
            for earlier, later in zip(timing.arrivals, timing.arrivals[1:], strict=False)
        ]
        return Round(
            case=case.name,
            way=way,
            ttfts=[timing.ttft for timing in last_turns],
            gaps=gaps,
            tokens=len(timings) * case.prompt.tokens,
            requests=len(timings),
            seconds=seconds,
            cpu=cpu,
            memory={name: resident_mib(pid) for name, pid in pids.items()},
        )

    async def _run_lane(self, case: Case, way: Way) -> list[Timing]:
        timings = []
        for _ in range(case.requests):
            if case.apart_seconds:
                await asyncio.sleep(self._source.uniform(0, case.apart_seconds))
            prompt = case.prompt.of(self._fresh())
            timings += [await way.run(prompt) for _ in range(case.turns)]
        return timings

    @asynccontextmanager
    async def _lanes(self, way: str, count: int) -> AsyncIterator[list[Way]]:
        fleet, clock = self._fleet, self._clock
        opened: list[Connection] = []
        channel: grpc.aio.Channel | None = None

        async def to(port: int) -> Connection:
            opened.append(await connect(port, clock))
            return opened[-1]

        lanes: list[Way] = []
        if way in ("grpc", "legs"):
            channel = open_channel(fleet.router_port if way == "grpc" else fleet.services_port)
            of_way = GrpcWay if way == "grpc" else LegsWay
            lanes += [of_way(channel, clock) for _ in range(count)]
        for _ in range(count - len(lanes)):
            match way:
                case "bare":
                    prefill, decode = await to(fleet.prefill_port), await to(fleet.decode_port)
                    lanes.append(BareWay(prefill, decode, clock))
                case "decode":
                    lanes.append(HttpWay(await to(fleet.decode_port), clock))
                case "baseline":
                    lanes.append(HttpWay(await to(fleet.baseline_port), clock))
                case "alone":
                    lanes.append(HttpWay(await to(fleet.alone_port), clock))
                case _:
                    lanes.append(HttpWay(await to(fleet.gateway_port), clock))
        try:
            yield lanes
        finally:
            for connection in opened:
                connection.close()
            if channel is not None:
                await channel.close()

    def _fresh(self) -> str:
        return f"bench-{self._source.randrange(1 << 48):012x}"
