"""Turns as the tests of this folder take them: streamed and greedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf.duration_pb2 import Duration

from kvloop import Completion, rpc
from kvloop.common.v1 import common_pb2
from kvloop.kvmeta.v1 import ledger_pb2, ledger_pb2_grpc
from tests.engine.engines import eventually
from tests.engine.world import MODEL, World

ANSWER = 100
NUM_BLOCKS = 8192
"""KV blocks of the small model in the launcher's 1 GiB."""


async def generate(world: World, prompt: Sequence[int], conversation: str) -> Completion:
    """One streamed token turn, greedy."""
    return await world.client.generate(
        list(prompt),
        model=MODEL,
        conversation_id=conversation,
        max_tokens=ANSWER,
        temperature=0,
        extra_body={"return_token_ids": True},
    ).collect()


async def chat(world: World, messages: Sequence[dict[str, Any]], conversation: str) -> Completion:
    """One streamed chat turn, greedy."""
    return await world.client.chat(
        list(messages),
        model=MODEL,
        conversation_id=conversation,
        max_tokens=ANSWER,
        temperature=0,
        extra_body={"return_token_ids": True},
    ).collect()


async def first_turn(world: World, conversation: str, count: int = 600) -> list[int]:
    """A first turn; returns prompt and answer."""
    prompt = world.tokens(count)
    done = await generate(world, prompt, conversation)
    assert done.receipt.miss_reason == "FIRST_TURN"
    assert done.receipt.retain_outcome == "RETAINED"
    assert done.receipt.retained_tokens == count + ANSWER - 1
    return [*prompt, *done.token_ids]


async def take_handle(world: World, conversation: str) -> ledger_pb2.Handle:
    """A conversation's handle, past the router."""
    key = common_pb2.ConversationKey(tenant="default", model=MODEL, conversation_id=conversation)
    async with rpc.open_channel(world.stack.kvmeta_address) as channel:
        ledger = ledger_pb2_grpc.LedgerServiceStub(channel)
        taken = await ledger.TakeHandle(
            ledger_pb2.TakeHandleRequest(key=key, request_id=f"test-{conversation}")
        )
    assert taken.WhichOneof("outcome") == "handle", taken
    return taken.handle


async def start_kvmeta(world: World) -> None:
    """Start kvmeta again; returns when turns are stored as before.

    Router and sidecars look for a ledger that went away in growing intervals.
    """
    await world.stack.start("kvmeta")

    async def stored() -> bool:
        conversation = world.conversation()
        done = await generate(world, world.tokens(50), conversation)
        await world.client.end_conversation(conversation, model=MODEL)
        receipt = done.receipt
        return receipt.miss_reason == "FIRST_TURN" and receipt.retain_outcome == "RETAINED"

    await eventually(stored, "the ledger is used again", seconds=60)


async def keep_conversations(world: World, seconds: int = 300) -> None:
    """Have everything that is retained kept for longer than the stack's TTL."""
    async with rpc.open_channel(world.stack.kvmeta_address) as channel:
        ledger = ledger_pb2_grpc.LedgerServiceStub(channel)
        listed = await ledger.ListPins(ledger_pb2.ListPinsRequest(page_size=1000))
        for pin in listed.pins:
            await ledger.ExtendConversation(
                ledger_pb2.ExtendConversationRequest(
                    key=pin.conversation.key, ttl=Duration(seconds=seconds)
                )
            )
