"""Engine cores without HTTP: their peers are in memory, their time is virtual."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from services.sim.blocks import FreedReads
from services.sim.core import EngineCore
from services.sim.faults import Fault
from services.sim.kv import Content
from services.sim.latency import PROFILES, Preset
from services.sim.link import Link
from services.sim.peers import PeerError, PeerInfo, SideChannel
from services.sim.sequence import Ending, OutputChannel, Sampling
from services.sim.sequence import Sequence as EngineSequence
from services.sim.spec import EngineSpec, KvRole, LoadFailurePolicy, new_identity
from services.worker.tasks import BackgroundTasks, background_tasks
from tests.unit.sim.virtual_clock import VirtualClock

BLOCK = 16
TTL = 480.0

SPEC = EngineSpec(
    index=0,
    kv_role=KvRole.BOTH,
    model="sim-model",
    host="127.0.0.1",
    port=1,
    side_channel_host="10.0.0.1",
    side_channel_port=5600,
    max_model_len=4096,
    block_size=BLOCK,
    num_blocks=1025,
    max_num_seqs=64,
    max_num_batched_tokens=2048,
    answer_tokens=0,
    profile=PROFILES[Preset.INSTANT],
    time_scale=1.0,
    has_sidecar=True,
    stock=False,
    bidirectional=True,
    kv_recompute_threshold=64,
    decoder_kv_blocks_ttl_seconds=TTL,
    pin_lease_seconds=TTL,
    kv_lease_seconds=30.0,
    load_failure_policy=LoadFailurePolicy.RECOMPUTE,
    freed_reads=FreedReads.NOISE,
    vllm_version=(0, 32, 0),
    prompt_tokens_details=False,
    engine_id=None,
)


class InMemoryPeers:
    """Implements Peers without a network."""

    def __init__(self) -> None:
        self.channels: dict[tuple[str, int], SideChannel] = {}

    async def meet(self, host: str, port: int) -> PeerInfo:
        """Shake hands."""
        return self._at(host, port).meet()

    async def read(
        self, host: str, port: int, epoch: str, blocks: Sequence[int], request_id: str
    ) -> list[Content]:
        """Read blocks and tell the peer so."""
        return self._at(host, port).read(epoch, blocks, request_id)

    async def notify(self, host: str, port: int, epoch: str, request_id: str) -> None:
        """Tell the peer that a request's blocks are not needed."""
        self._at(host, port).notify(epoch, request_id)

    async def renew(self, host: str, port: int, epoch: str, request_ids: Sequence[str]) -> None:
        """Ask the peer to keep requests' blocks for longer."""
        self._at(host, port).renew(epoch, request_ids)

    def _at(self, host: str, port: int) -> SideChannel:
        try:
            return self.channels[host, port]
        except KeyError:
            raise PeerError(f"nobody at {host}:{port}") from None


@dataclass
class Answer:
    """What a request has come to."""

    tokens: list[int]
    ending: Ending
    handed_over: dict[str, Any] | None
    """kv_transfer_params of the reply."""
    sequence: EngineSequence

    @property
    def params(self) -> dict[str, Any]:
        """kv_transfer_params, where there must be some."""
        assert self.handed_over is not None
        return self.handed_over


class Lab:
    """Makes engines and asks them."""

    def __init__(self, clock: VirtualClock, tasks: BackgroundTasks) -> None:
        self.clock = clock
        self.peers = InMemoryPeers()
        self.events: list[dict[str, Any]] = []
        self._tasks = tasks
        self._numbers = itertools.count(1)

    def engine(self, *, link: Link | None = None, **changes: Any) -> EngineCore:
        """An engine that runs, with a side channel of its own."""
        changes.setdefault("side_channel_port", 5600 + next(self._numbers))
        spec = replace(SPEC, **changes)
        core = EngineCore(
            spec,
            new_identity(spec),
            peers=self.peers,
            clock=self.clock,
            tasks=self._tasks,
            send_event=lambda event, late: self.events.append(event),
            link=link,
        )
        self.peers.channels[spec.side_channel_host, spec.side_channel_port] = core.side_channel
        self._tasks.start(core.run(), name="core")
        return core

    def sequence(
        self,
        core: EngineCore,
        prompt: Sequence[int],
        *,
        max_tokens: int = 8,
        params: dict[str, Any] | None = None,
        salt: str | None = None,
        faults: Sequence[Fault] = (),
        sampling: Sampling | None = None,
    ) -> EngineSequence:
        """A request, not yet submitted."""
        return EngineSequence(
            request_id=f"request-{next(self._numbers)}",
            choice=0,
            tokens=list(prompt),
            prompt_tokens=len(prompt),
            sampling=sampling or Sampling(max_tokens=max_tokens),
            salt=salt,
            params=dict(params) if params is not None else None,
            channel=OutputChannel(),
            kv=core.reader(),
            arrived_at=self.clock.monotonic(),
            faults=faults,
        )

    async def ask(self, core: EngineCore, prompt: Sequence[int], **options: Any) -> Answer:
        """Submit a request and let time pass until it has ended."""
        sequence = self.sequence(core, prompt, **options)
        core.submit(sequence)
        return await self.clock.run(finish(sequence))

    async def turn(
        self,
        prefill: EngineCore,
        decode: EngineCore,
        prompt: Sequence[int],
        *,
        handle: dict[str, Any] | None = None,
        max_tokens: int = 40,
        **options: Any,
    ) -> tuple[Answer, Answer]:
        """Both legs of a turn, as the sidecars run them."""
        first = FIRST_PREFILL if handle is None else handle
        handed = await self.ask(prefill, prompt, max_tokens=1, params=first, **options)
        params = handed.params | {"kvloop_turn_id": f"turn-{next(self._numbers)}"}
        answer = await self.ask(decode, prompt, max_tokens=max_tokens, params=params, **options)
        return handed, answer


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Token ids that differ with the seed."""
    return [1000 + (seed * 7919 + index * 31) % 1500 for index in range(length)]


async def recomputed(lab: Lab, tokens: list[int], count: int = 40) -> list[int]:
    """What an engine says that has computed everything itself: the right answer."""
    return (await lab.ask(lab.engine(), tokens, max_tokens=count)).tokens


FIRST_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


async def finish(sequence: EngineSequence) -> Answer:
    """Collect a request's outputs until it has ended."""
    tokens: list[int] = []
    while True:
        for output in await sequence.channel.take():
            if output.token is not None:
                tokens.append(output.token)
            if output.ending is not None:
                return Answer(tokens, output.ending, output.params, sequence)


@asynccontextmanager
async def open_lab() -> AsyncIterator[Lab]:
    """A lab whose engines end with the block."""
    async with background_tasks() as tasks:
        yield Lab(VirtualClock(), tasks)
