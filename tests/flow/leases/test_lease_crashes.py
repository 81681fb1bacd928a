"""kill -9 of any service at any step of a turn: no orphans, and no wrong token ever.

Services are processes of their own; the engines are simulated ones in this process,
to which the sidecars attach, so that they outlive their sidecars.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvloop import AsyncClient, Completion, rpc
from kvloop.errors import KvloopError
from kvloop.kvmeta.v1 import ledger_pb2, ledger_pb2_grpc
from kvloop.stack import Stack, StackSettings
from kvloop.stack.settings import WorkerSettings
from kvloop.worker.v1 import worker_pb2, worker_pb2_grpc
from tests.flow.faults.rest import eventually
from tests.flow.leases.world import ANSWER, generate
from tests.flow.sim.engines import MODEL, EngineClient, engine, prompt

LEASE = 40.0
"""Half of it is left at any time, and a service that was killed has to be back by then:
on a busy machine a process takes many seconds to start."""
PATIENCE = 30.0
"""Seconds more that a busy machine takes for anything."""
SIDECAR = (
    "--settle-timeout-seconds=2",
    # What is kept and for how long shall not depend on how busy the machine is.
    "--event-timeout-seconds=10",
    "--lost-turns-share=0",
)
AVAILABLE = ledger_pb2.Conversation.STATE_AVAILABLE


@dataclass
class Processes:
    """The running services, and engines that do not fall with them."""

    stack: Stack
    client: AsyncClient
    prefill: EngineClient
    decode: EngineClient
    referee: EngineClient

    async def right(self, tokens: Sequence[int]) -> list[int]:
        """What an engine answers that computes everything itself."""
        reply = await self.referee.complete(list(tokens), max_tokens=ANSWER)
        answer: list[int] = reply.choice["token_ids"]
        return answer

    async def turn(self, tokens: Sequence[int], name: str, **extra: Any) -> Completion | None:
        """One turn: its answer, which must be right, or None if it failed."""
        try:
            done = await generate(self.client, tokens, name, **extra)
        except KvloopError:
            return None
        assert list(done.token_ids) == await self.right(tokens)
        return done

    async def retained_turn(self, tokens: Sequence[int], name: str) -> Completion:
        """One turn, tried again while services find each other after a restart."""
        while True:
            done = await self.turn(tokens, name)
            # While no prefill worker is there, decode computes the prompt itself.
            if (
                done is not None
                and done.receipt.retain_outcome == "RETAINED"
                and done.receipt.prefill_worker_id
            ):
                return done
            await asyncio.sleep(0.2)

    async def held(self) -> dict[str, int]:
        """Retained turns and their blocks, by who says so."""
        pins, info = (await self.decode.state())["pins"], await self.info()
        return {
            "engine's pins": len(pins),
            "ledger's pins": await self.owned_pins(),
            "sidecar's pins": info.retained_pins,
            "orphans": info.orphan_pins,
            "blocks without a sidecar": sum(len(pin["blocks"]) for pin in pins)
            - info.retained_blocks,
        }

    async def deadlines(self) -> dict[str, float]:
        """When each pin falls unless it is renewed, on this process's clock."""
        pins = (await self.decode.state())["pins"]
        return {pin["request_id"]: time.monotonic() + pin["expires_in_seconds"] for pin in pins}

    async def owned_pins(self) -> int:
        """Pins that the ledger knows an owner of."""
        async with rpc.open_channel(self.stack.kvmeta_address) as channel:
            stub = ledger_pb2_grpc.LedgerServiceStub(channel)
            listed = await stub.ListPins(ledger_pb2.ListPinsRequest(page_size=1000))
        return sum(pin.conversation.state == AVAILABLE for pin in listed.pins)

    async def info(self) -> worker_pb2.GetWorkerInfoResponse:
        """What decode's sidecar says of itself."""
        async with rpc.open_channel(self.stack.address("decode-0")) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            info: worker_pb2.GetWorkerInfoResponse = await stub.GetWorkerInfo(
                worker_pb2.GetWorkerInfoRequest()
            )
        return info


@asynccontextmanager
async def _processes(tmp_path: Path) -> AsyncIterator[Processes]:
    async with AsyncExitStack() as stack:
        referee = await stack.enter_async_context(engine(role="both"))
        engines, workers = [], []
        for role in ("prefill", "decode"):
            client = await stack.enter_async_context(
                engine(
                    role=role,
                    events_socket=str(tmp_path / f"{role}-0.sock"),
                    pin_lease_seconds=LEASE,
                )
            )
            engines.append(client)
            attach = (f"--engine-url={client.url}", *SIDECAR)
            workers.append(WorkerSettings(role=role, args=attach))
        services = await stack.enter_async_context(
            Stack(StackSettings(model=MODEL, workers=tuple(workers), run_dir=tmp_path))
        )
        caller = await stack.enter_async_context(AsyncClient(services.router_address))
        yield Processes(services, caller, engines[0], engines[1], referee)


@dataclass(frozen=True)
class Step:
    """A moment of a turn, and how an engine keeps the turn there for a while."""

    fault: str
    """Fault that one of the engines meets; empty: none is needed."""

    def engine(self, world: Processes) -> EngineClient:
        """The engine that the turn is waiting for then."""
        return world.prefill if self.fault.endswith("prefill") else world.decode

    async def reached(self, world: Processes) -> int:
        """How often a turn has got there."""
        applied: dict[str, int] = (await self.engine(world).state())["faults_applied"]
        return applied.get(self.fault.partition(";")[0], 0)


STEPS = {
    "before take": Step(""),
    "after take": Step("hang;seconds=3;leg=prefill"),
    "after prefill": Step("hang;seconds=3;leg=decode"),
    # The engine itself is done by then and retains the turn; nobody has committed it.
    "mid-stream": Step("stall;after_tokens=5;seconds=3;leg=decode"),
    "after commit": Step(""),
}


async def _turn_with_a_crash(
    world: Processes, name: str, at: str, victim: str, history: Sequence[int]
) -> list[int]:
    """A turn during which a service is killed; returns the history as its client has it."""
    step = STEPS[at]
    tokens = [*history, 7]
    before = await step.reached(world)
    if at == "before take":
        world.stack.kill(victim)
    extra = {"vllm_xargs": {"sim_fault": step.fault}} if step.fault else {}
    turn = asyncio.ensure_future(world.turn(tokens, name, **extra))
    if step.fault:
        async with asyncio.timeout(PATIENCE):
            while await step.reached(world) == before:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    if at == "after commit":
        await turn
    if at != "before take":
        world.stack.kill(victim)
    done = await turn
    await world.stack.start(victim)
    return [*tokens, *done.token_ids] if done is not None else tokens


@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", ["prefill-0", "decode-0", "kvmeta", "router"])
async def test_a_service_killed_at_any_step_leaves_no_orphan_and_no_wrong_token(
    tmp_path: Path, victim: str
) -> None:
    async with _processes(tmp_path) as world:
        for number, at in enumerate(STEPS):
            first = await world.retained_turn(prompt(500, seed=number), at)
            history = [*prompt(500, seed=number), *first.token_ids]
            history = await _turn_with_a_crash(world, at, at, victim, history)
            # Whatever became of the turn, its client goes on, and gets right answers.
            await world.retained_turn([*history, 8], at)

        # What a crash has left without an owner falls with its lease, and nothing else does.
        pins = ("engine's pins", "ledger's pins", "sidecar's pins")
        nothing = {"orphans": 0, "blocks without a sidecar": 0}
        await eventually(
            world.held, dict.fromkeys(pins, len(STEPS)) | nothing, seconds=LEASE + PATIENCE
        )
        before = await world.deadlines()

        async def renewed() -> set[str]:
            # Looking at one twice does not give the very same time.
            return {name for name, at in (await world.deadlines()).items() if at > before[name] + 1}

        await eventually(renewed, set(before), seconds=LEASE + PATIENCE)
        assert await world.decode.metric("vllm:nixl_num_notifications_after_expiry_total") == 0
