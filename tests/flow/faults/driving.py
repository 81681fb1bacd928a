"""Runs a case: brings a turn to a step, lets the fault strike, lets go."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import msgspec
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvloop import rpc
from kvloop.kvmeta.v1 import ledger_pb2
from services.sim.faults import parse
from tests.flow.faults.cases import Act, Case, Step
from tests.flow.faults.life import Life
from tests.flow.faults.rest import eventually
from tests.flow.faults.turns import ANSWER_TOKENS, Turn
from tests.flow.faults.world import REFUSAL_SECONDS, Worker, World
from tests.flow.sim.engines import poll

HOLD_SECONDS = 20.0
"""How long a turn is held at a step; passes by a jump of the clock."""
_NUDGE_SECONDS = 5.0
"""How long slow engines take; likewise."""
_TOKENS = 5
"""Tokens that the client has when the turn is mid-stream."""

_TAKEN = ledger_pb2.Conversation.STATE_TAKEN

_Doing = Callable[["Scene", Turn | None], Coroutine[Any, Any, None]]


@dataclass
class Scene:
    """A turn, and the workers on its path."""

    world: World
    case: Case
    prefill: Worker
    decode: Worker

    def of_leg(self, fault: str) -> list[Worker]:
        """Workers that meet a fault."""
        worker = self.prefill if "leg=prefill" in fault else self.decode
        role = worker.worker_id.partition("-")[0]
        return self.world.of_role(role) if self.case.everywhere else [worker]

    async def meet(self, fault: str) -> None:
        """Let the workers of a leg meet a fault, once each."""
        for worker in self.of_leg(fault):
            await _meet(worker, fault)

    async def met(self, fault: str) -> int:
        """How often they have met it."""
        return sum([await _times_met(worker, fault) for worker in self.of_leg(fault)])


async def run(scene: Scene, make_turn: Callable[[asyncio.TaskGroup], Turn]) -> Turn:
    """Run the case's turn to its end, with the fault."""
    async with asyncio.TaskGroup() as tasks:
        if isinstance(scene.case.strike, Act):
            return await _with_act(scene, scene.case.strike, make_turn, tasks)
        return await _with_fault(scene, scene.case.strike, make_turn, tasks)


async def _with_fault(
    scene: Scene,
    fault: str,
    make_turn: Callable[[asyncio.TaskGroup], Turn],
    tasks: asyncio.TaskGroup,
) -> Turn:
    before = await scene.met(fault)
    await scene.meet(fault)
    turn = make_turn(tasks)
    if "seconds" in fault:
        passed = before
        while not turn.over:
            await asyncio.sleep(0.05)
            # Once for each engine: on a busy machine more would use up leases.
            if (met := await scene.met(fault)) > passed:
                passed = met
                await scene.world.clock.advance(_NUDGE_SECONDS)
    await turn.end()
    met = await scene.met(fault) - before
    assert met == len(scene.of_leg(fault)), f"the fault was met {met} times"
    return turn


async def _with_act(
    scene: Scene,
    act: Act,
    make_turn: Callable[[asyncio.TaskGroup], Turn],
    tasks: asyncio.TaskGroup,
) -> Turn:
    step = scene.case.step
    if step is Step.BEFORE_P:
        if act is Act.CLIENT_LEAVES:
            return await _leave_before_p(scene, make_turn, tasks)
        await _ACTS[act](scene, None)
        turn = make_turn(tasks)
        await turn.end()
        return turn
    hold, worker = _HOLDS[step], scene.prefill if step is Step.IN_P else scene.decode
    before = await _times_met(worker, hold)
    await _meet(worker, f"{hold};seconds={HOLD_SECONDS}")
    turn = make_turn(tasks)
    async with asyncio.timeout(40):
        await _reached(scene, step, turn)
    assert await _times_met(worker, hold) == before + 1
    acting = tasks.create_task(_ACTS[act](scene, turn))
    if act in _LEAVING:  # takes until the turn is over
        await _begins_to_leave(_LEAVING[act](scene).service.port)
        if act is Act.D_SIDECAR_LEAVES:
            await poll(lambda: not _takes_turns(scene.world, scene.decode))
    else:
        await acting
    await scene.world.clock.advance(HOLD_SECONDS)
    await turn.end()
    await acting
    return turn


async def _leave_before_p(
    scene: Scene, make_turn: Callable[[asyncio.TaskGroup], Turn], tasks: asyncio.TaskGroup
) -> Turn:
    """Hang up while the ledger is asked for the handle."""
    link = scene.world.kvmeta_links[0]
    link.lose_replies()
    turn = make_turn(tasks)

    async def taken() -> bool:
        return any(pin.conversation.state == _TAKEN for pin in await scene.world.pins())

    await eventually(taken, True)
    turn.leave()
    await turn.end()
    link.resume()
    return turn


_HOLDS = {
    Step.IN_P: "slow_transfer;leg=prefill",
    Step.BETWEEN: "hang;leg=decode",
    Step.BEFORE_FIRST_BYTE: "slow_transfer;leg=decode",
    Step.MID_STREAM: f"stall;after_tokens={_TOKENS};leg=decode",
    Step.AT_COMMIT: "delay_event;leg=decode",
}


async def _meet(worker: Worker, fault: str) -> None:
    (asked,) = parse(f"{fault};count=1")
    reply = await worker.engine.post("/sim/faults", msgspec.to_builtins(asked))
    assert reply.status == 200, reply.json


async def _times_met(worker: Worker, fault: str) -> int:
    kind = fault.partition(";")[0]
    return int((await worker.state())["faults_applied"].get(kind, 0))


async def _reached(scene: Scene, step: Step, turn: Turn) -> None:
    match step:
        case Step.IN_P:
            await scene.prefill.until(lambda state: bool(state["loading"]))
        case Step.BETWEEN:
            # The fault is used up when it is met.
            await scene.decode.until(lambda state: not state["faults"])
        case Step.BEFORE_FIRST_BYTE:
            await scene.decode.until(lambda state: bool(state["loading"]))
        case Step.MID_STREAM:
            await turn.received(_TOKENS)
        case _:
            # The last chunk is held back until the turn is committed.
            await turn.received(ANSWER_TOKENS - 1)


_LEAVING: Mapping[Act, Callable[[Scene], Life[Any]]] = {
    Act.P_SIDECAR_LEAVES: lambda scene: scene.prefill.sidecar,
    Act.D_SIDECAR_LEAVES: lambda scene: scene.decode.sidecar,
    Act.ROUTER_LEAVES: lambda scene: scene.world.router,
}


async def _begins_to_leave(port: int) -> None:
    """Wait until a service says that it does not serve, or does not answer."""
    async with rpc.open_channel(f"127.0.0.1:{port}") as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)

        async def serves() -> bool:
            try:
                reply = await health.Check(health_pb2.HealthCheckRequest())
            except grpc.RpcError:
                return False
            return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

        await eventually(serves, False)


def _takes_turns(world: World, worker: Worker) -> bool:
    """Whether the router would send turns there."""
    found = world.router.service.pool.find(worker.worker_id)
    return found is not None and found.takes_turns


async def _client_leaves(scene: Scene, turn: Turn | None) -> None:
    assert turn is not None
    turn.leave()
    world = scene.world
    await poll(
        lambda: (
            not world.router.service.admission.running
            and not any(worker.sample("legs_in_flight") for worker in world.workers.values())
        )
    )


async def _and_is_missed(going: Coroutine[Any, Any, None]) -> None:
    """Wait until gRPC's clients know that kvmeta is gone.

    A commit on a connection whose end they have not noticed may be stored, for all that a
    sidecar knows: it asks until kvmeta is back, and the next turn pulls. Several short waits
    are longer than one, for a process that is kept from running.
    """
    await going
    for _ in range(10):
        await asyncio.sleep(0.03)


async def _kvmeta_hangs(scene: Scene, turn: Turn | None) -> None:
    for link in scene.world.kvmeta_links:
        link.hang()


async def _kvmeta_mute(scene: Scene, turn: Turn | None) -> None:
    for link in scene.world.kvmeta_links:
        link.lose_replies()


def _restart(
    of: Callable[[Scene], Worker],
) -> _Doing:
    async def restart(scene: Scene, turn: Turn | None) -> None:
        worker = of(scene)
        state = await worker.state()
        worker.engine.host.restart(0.0)
        await worker.engine.next_life(state)

    return restart


def _refuse(
    of: Callable[[Scene], Worker],
) -> _Doing:
    async def refuse(scene: Scene, turn: Turn | None) -> None:
        of(scene).engine.host.refuse(REFUSAL_SECONDS)

    return refuse


_ACTS: Mapping[Act, _Doing] = {
    Act.P_REFUSES: _refuse(lambda scene: scene.prefill),
    Act.D_REFUSES: _refuse(lambda scene: scene.decode),
    Act.P_RESTARTS: _restart(lambda scene: scene.prefill),
    Act.D_RESTARTS: _restart(lambda scene: scene.decode),
    Act.KVMETA_KILLED: lambda scene, _: _and_is_missed(scene.world.kvmeta.kill()),
    Act.KVMETA_HANGS: _kvmeta_hangs,
    Act.KVMETA_MUTE: _kvmeta_mute,
    Act.KVMETA_LEAVES: lambda scene, _: _and_is_missed(scene.world.kvmeta.end()),
    Act.P_SIDECAR_KILLED: lambda scene, _: scene.prefill.sidecar.kill(),
    Act.D_SIDECAR_KILLED: lambda scene, _: scene.decode.sidecar.kill(),
    Act.P_SIDECAR_LEAVES: lambda scene, _: scene.prefill.sidecar.end(),
    Act.D_SIDECAR_LEAVES: lambda scene, _: scene.decode.sidecar.end(),
    Act.ROUTER_LEAVES: lambda scene, _: scene.world.router.end(),
    Act.CLIENT_LEAVES: _client_leaves,
}


def counters(world: World) -> Counter[str]:
    """What the router and the sidecars have counted, by name."""
    counted: Counter[str] = Counter()
    for metric in world.router.service.metrics.registry.collect():
        for sample in metric.samples:
            name = _COUNTED.get(sample.name)
            if name is not None and sample.value:
                counted[f"{name}{next(iter(sample.labels.values()))}"] = int(sample.value)
    return counted


_COUNTED = {
    "kvloop_router_turns_total": "turn ",
    "kvloop_router_errors_total": "error ",
    "kvloop_router_misses_total": "miss ",
    "kvloop_router_fallbacks_total": "",
    "kvloop_router_handle_returns_total": "returned ",
}
