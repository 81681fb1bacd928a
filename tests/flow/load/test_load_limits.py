"""One channel per worker, one pool per engine, and limits that hold."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.flow.gateway.fleet import Fleet, fleet
from tests.flow.sim.engines import MODEL, poll
from tests.flow.worker.stack import CHAT, SILENT_ENGINE, answer, collect, decode_request, sidecar
from tests.unit.worker.fakes import until

SLOW = {"inter_token_seconds": 0.05}


async def _turns(stack: Fleet, count: int) -> list[int]:
    """The statuses of so many chats at once."""

    async def turn(number: int) -> int:
        messages = [{"role": "user", "content": f"this is number {number}"}]
        body: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": 10}
        return (await stack.post("/v1/chat/completions", {**body, "ignore_eos": True})).status

    return list(await asyncio.gather(*(turn(number) for number in range(count))))


async def test_E8_turns_share_one_channel_per_worker(tmp_path: Path) -> None:
    async with fleet(tmp_path, decode=SLOW) as stack, asyncio.TaskGroup() as tasks:
        turns = tasks.create_task(_turns(stack, 40))
        await poll(lambda: stack.count("running_turns") == 40)

        assert stack.count("worker_channels") == 2

        assert await turns == [200] * 40
        assert stack.count("running_turns") == 0
        assert stack.count("worker_channels") == 2


async def test_E8_no_more_turns_run_than_are_allowed(tmp_path: Path) -> None:
    async with (
        fleet(tmp_path, decode=SLOW, max_running_turns=4) as stack,
        asyncio.TaskGroup() as tasks,
    ):
        turns = tasks.create_task(_turns(stack, 20))
        await poll(lambda: stack.count("waiting_turns") == 16)
        most = 0
        while not turns.done():
            state = await stack.decode.state()
            most = max(most, len(state["running"]) + len(state["waiting"]))
        assert most == 4
        assert await turns == [200] * 20


async def test_E8_an_engine_gets_no_more_connections_than_are_allowed(tmp_path: Path) -> None:
    async with sidecar(tmp_path, engine_max_connections=3, **SILENT_ENGINE) as stack:
        hold = asyncio.Event()
        stack.vllm.answers[CHAT] = answer(hold)
        async with asyncio.TaskGroup() as tasks:
            legs = [
                tasks.create_task(collect(stack.stub.Decode(decode_request(turn_id=f"t{number}"))))
                for number in range(9)
            ]
            await until(lambda: stack.metric("legs_in_flight") == 9)
            await until(lambda: len(stack.vllm.requests(CHAT)) == 3)
            hold.set()
        received = stack.vllm.requests(CHAT)
        assert len(received) == len(legs) == 9
        assert len({request.connection for request in received}) == 3
        assert all(
            summary.usage.completion_tokens == 2 for _, summary in (leg.result() for leg in legs)
        )
