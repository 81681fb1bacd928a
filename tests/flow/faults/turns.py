"""Turns of one conversation, as its client sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from kvloop.errors import KvloopError
from kvloop.receipts import Receipt
from tests.flow.faults.world import Worker, World
from tests.flow.sim.engines import MODEL, poll

ANSWER_TOKENS = 40
RIGHT = "right"
GONE = "gone"
PULLED = "pulled"
_DEADLINE_SECONDS = 90.0


class Turn:
    """A turn that runs, or has ended: what its client has of it.

    Args:
        world: whom to ask.
        conversation: id of the conversation.
        tokens: the prompt.
        tasks: owns it.
    """

    def __init__(
        self,
        world: World,
        conversation: str,
        tokens: Sequence[int],
        tasks: asyncio.TaskGroup,
    ) -> None:
        self.conversation = conversation
        self.tokens = list(tokens)
        self.answer: list[int] = []
        self.receipt: Receipt | None = None
        self.error: KvloopError | None = None
        self._task = tasks.create_task(self._run(world))

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self._task.done()

    @property
    def outcome(self) -> str:
        """RIGHT, GONE, or the reason of the error."""
        if self._task.cancelled():
            return GONE
        return RIGHT if self.error is None else self.error.reason

    async def end(self) -> None:
        """Wait for its end."""
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            self._task.result()

    def leave(self) -> None:
        """Hang up."""
        self._task.cancel()

    @property
    def reuse(self) -> str:
        """PULLED, or why nothing was pulled."""
        assert self.receipt is not None
        return self.receipt.miss_reason or PULLED

    async def received(self, tokens: int) -> None:
        """Wait until the client has so many tokens of the answer."""
        await poll(lambda: len(self.answer) >= tokens)

    async def _run(self, world: World) -> None:
        more: dict[str, Any] = {"return_token_ids": True, "ignore_eos": True}
        stream = world.client.generate(
            self.tokens,
            model=MODEL,
            conversation_id=self.conversation,
            max_tokens=ANSWER_TOKENS,
            extra_body=more,
            timeout_seconds=_DEADLINE_SECONDS,
        )
        try:
            async with stream as chunks:
                async for chunk in chunks:
                    for choice in chunk.choices:
                        self.answer += choice.token_ids or ()
                self.receipt = (await chunks.collect()).receipt
        except KvloopError as error:
            self.error = error


async def right_answer(world: World, tokens: Sequence[int]) -> list[int]:
    """What an engine answers that computes everything itself."""
    reply = await world.referee.complete(list(tokens), max_tokens=ANSWER_TOKENS)
    answer: list[int] = reply.choice["token_ids"]
    return answer


async def right_turn(world: World, conversation: str, tokens: Sequence[int]) -> Turn:
    """A turn without a fault, which must be right and retained."""
    async with asyncio.TaskGroup() as tasks:
        turn = Turn(world, conversation, tokens, tasks)
        await turn.end()
    assert turn.outcome == RIGHT, turn.error
    assert turn.answer == await right_answer(world, tokens)
    assert turn.receipt is not None
    assert turn.receipt.retain_outcome == "RETAINED"
    return turn


def on_path(world: World, turn: Turn) -> tuple[Worker, Worker]:
    """The prefill and the decode worker that a turn went to."""
    assert turn.receipt is not None
    path = turn.receipt.prefill_worker_id, turn.receipt.decode_worker_id
    return world.workers[path[0]], world.workers[path[1]]
