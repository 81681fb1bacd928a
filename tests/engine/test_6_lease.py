"""Retained KV as a lease, on a real decode engine: released, renewed, evicted, never orphaned.

Leases last 20 s here, and conversations are retained for 600 s.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import aiohttp
import pytest
import pytest_asyncio
from google.protobuf.duration_pb2 import Duration

from kvloop import rpc
from kvloop.common.v1 import common_pb2
from kvloop.inventory import list_workers
from kvloop.kvmeta.v1 import ledger_pb2, ledger_pb2_grpc
from kvloop.worker.v1 import worker_pb2, worker_pb2_grpc
from tests.engine.engines import eventually
from tests.engine.leased import LEASE_SECONDS, NUM_BLOCKS, WORKER_ID, LeasedDecode
from tests.engine.turns import ANSWER, first_turn, generate, start_kvmeta, take_handle
from tests.engine.world import MODEL, World

REUSED_AFTER_SECONDS = 45
TOKENS = 2000
SHORT = 100
"""Tokens of a prompt that takes next to nothing of decode's memory, ..."""
LITTLE = 8
"""... that is, at most so many blocks with its answer."""


@dataclass
class Early:
    """A conversation that was retained before everything else happened."""

    conversation: str
    history: list[int]
    since: float


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def early(world: World, decode: LeasedDecode) -> Early:
    """Retained at the start, reused at the end; and both engines have met.

    Without a progress thread, as on CPU, a prefill engine's first word to a decode
    engine goes out with its next step, and it may be that which frees blocks.
    """
    meeting = world.conversation()
    await _reuse(world, meeting, await first_turn(world, meeting))
    await world.client.end_conversation(meeting, model=MODEL)
    conversation = world.conversation()
    history = await first_turn(world, conversation)
    return Early(conversation, history, asyncio.get_running_loop().time())


@contextlib.asynccontextmanager
async def _ledger(world: World) -> AsyncIterator[ledger_pb2_grpc.LedgerServiceAsyncStub]:
    async with rpc.open_channel(world.stack.kvmeta_address) as channel:
        stub: ledger_pb2_grpc.LedgerServiceAsyncStub = ledger_pb2_grpc.LedgerServiceStub(channel)
        yield stub


def _key(conversation: str) -> common_pb2.ConversationKey:
    return common_pb2.ConversationKey(tenant="default", model=MODEL, conversation_id=conversation)


async def _end(world: World, conversation: str, history: list[int]) -> None:
    assert (await world.client.end_conversation(conversation, model=MODEL)).released


async def _expire(world: World, conversation: str, history: list[int]) -> None:
    async with _ledger(world) as ledger:
        await ledger.ExtendConversation(
            ledger_pb2.ExtendConversationRequest(
                key=_key(conversation), ttl=Duration(nanos=100_000_000)
            )
        )
    await asyncio.sleep(0.1)  # its time; what follows is the release


async def _supersede(world: World, conversation: str, history: list[int]) -> None:
    async with _ledger(world) as ledger:
        found = await ledger.GetConversation(
            ledger_pb2.GetConversationRequest(key=_key(conversation))
        )
        await ledger.CommitTurn(
            ledger_pb2.CommitTurnRequest(
                key=_key(conversation),
                request_id=f"newer-{conversation}"[:64],
                turn=found.conversation.turn + 1,
                worker_id=WORKER_ID,
                engine=await _engine(world),
                transfer_params_json=b'{"remote_request_id":"elsewhere"}',
                engine_ttl=Duration(seconds=10),
            )
        )


async def _engine(world: World) -> common_pb2.EngineRef:
    entries = await asyncio.to_thread(lambda: list(list_workers(world.stack.kvmeta_address)))
    return next(e.worker.engine for e in entries if e.worker.worker_id == WORKER_ID)


async def _delete(world: World, conversation: str, history: list[int]) -> None:
    url = f"{world.stack.gateway_url}/v1/conversations/{conversation}"
    async with aiohttp.ClientSession() as session, session.delete(url) as reply:
        assert (await reply.json())["deleted"] is True


async def _mismatch(world: World, conversation: str, history: list[int]) -> None:
    prompt = [history[0] ^ 1, *history[1:SHORT]]
    assert await _miss(world, conversation, prompt) == "PREFIX_MISMATCH"


async def _cached(world: World, conversation: str, history: list[int]) -> None:
    assert await _miss(world, conversation, history[:SHORT]) in ("CACHED", "BELOW_THRESHOLD")


async def _below_threshold(world: World, conversation: str, history: list[int]) -> None:
    prompt = [*history[:40], *world.tokens(SHORT)]  # one block is proven
    await world.prefill.forget_prefixes()
    assert await _miss(world, conversation, prompt) == "BELOW_THRESHOLD"


async def _miss(world: World, conversation: str, prompt: list[int]) -> str | None:
    """A short turn, which does not want what is retained; why nothing was pulled."""
    done = await world.client.generate(
        prompt, model=MODEL, conversation_id=conversation, max_tokens=1
    ).collect()
    assert done.receipt.handle_hit
    assert done.receipt.pulled_tokens == 0
    return done.receipt.miss_reason


RELEASES: dict[str, Callable[[World, str, list[int]], Awaitable[None]]] = {
    "ended": _end,
    "deleted over HTTP": _delete,
    "expired": _expire,
    "superseded": _supersede,
    "mismatch": _mismatch,
    "cached": _cached,
    "below threshold": _below_threshold,
}


async def test_a_turn_that_the_ledger_did_not_get_is_free_within_2_s(
    world: World, decode: LeasedDecode
) -> None:
    before = await decode.blocks()
    world.stack.kill("kvmeta")
    try:
        done = await generate(world, world.tokens(TOKENS), world.conversation())
        assert done.receipt.retain_outcome == "LEDGER_UNAVAILABLE"
        await decode.down_to(before, "a turn without a row is freed")
    finally:
        await start_kvmeta(world)


@pytest.mark.usefixtures("early")
@pytest.mark.parametrize("cause", RELEASES)
async def test_what_nobody_wants_any_more_is_free_within_2_s(
    world: World, decode: LeasedDecode, cause: str
) -> None:
    before = await decode.blocks()
    conversation = world.conversation()
    history = await first_turn(world, conversation, TOKENS)
    await decode.up_to(before + TOKENS // 32, "a turn is retained")
    await RELEASES[cause](world, conversation, history)
    await decode.down_to(before + LITTLE, f"its blocks are freed: {cause}")


async def test_releasing_what_is_unknown_or_released_is_harmless(
    world: World, decode: LeasedDecode
) -> None:
    kept, conversation = world.conversation(), world.conversation()
    history = await first_turn(world, kept)
    before = await decode.blocks()
    await first_turn(world, conversation, TOKENS)
    handle = await take_handle(world, conversation)
    unknown = b'{"remote_request_id":"cmpl-unknown"}'
    async with rpc.open_channel(decode.sidecar.address) as channel:
        worker = worker_pb2_grpc.WorkerServiceStub(channel)
        for _ in range(2):
            await worker.ReleaseBlocks(
                worker_pb2.ReleaseBlocksRequest(
                    engine=await _engine(world),
                    transfer_params_json=[handle.transfer_params_json, unknown] * 2,
                )
            )
            await decode.down_to(before, "the released turn's blocks are free")
    await _reuse(world, kept, history)
    await world.client.end_conversation(kept, model=MODEL)


async def test_a_turn_whose_client_leaves_is_free_within_2_s(
    world: World, decode: LeasedDecode
) -> None:
    before = await decode.blocks()
    async with world.client.generate(
        world.tokens(TOKENS), model=MODEL, conversation_id=world.conversation(), max_tokens=2000
    ) as answer:
        async for _ in answer:
            break
    await decode.down_to(before, "an abandoned turn's blocks are freed")


async def test_a_turn_is_reused_after_more_than_two_leases_and_is_exact(
    world: World, decode: LeasedDecode, early: Early
) -> None:
    loop = asyncio.get_running_loop()
    await asyncio.sleep(max(0.0, early.since + REUSED_AFTER_SECONDS - loop.time()))
    (pin,) = [
        pin
        for pin in await decode.owned()
        if pin.conversation.key.conversation_id == early.conversation
    ]
    assert pin.engine_remaining.seconds <= LEASE_SECONDS < REUSED_AFTER_SECONDS <= pin.age.seconds
    assert pin.num_bytes > 0
    await _reuse(world, early.conversation, early.history)


async def _reuse(world: World, conversation: str, history: list[int]) -> None:
    """A turn that pulls all that is retained, and is right."""
    await world.prefill.forget_prefixes()
    pulled = await world.prefill.pulled_tokens()
    prompt = [*history, *world.tokens(20)]
    done = await generate(world, prompt, conversation)
    assert done.receipt.pulled_tokens == len(history) - 1
    assert await world.prefill.pulled_tokens() - pulled == len(history) - 1
    assert done.receipt.miss_reason is None
    assert done.token_ids == await world.prefill.recompute_prompt(prompt, ANSWER)


async def test_retained_kv_gives_way_to_new_work(world: World, decode: LeasedDecode) -> None:
    conversations = [world.conversation() for _ in range(4)]
    for conversation in conversations:
        await first_turn(world, conversation, 3000)

    async def within_budget() -> bool:
        return (await decode.sidecar.info()).retained_blocks <= NUM_BLOCKS // 2

    await eventually(within_budget, "no more than half is retained")
    kept = {pin.conversation.key.conversation_id for pin in await decode.owned()}
    assert conversations[0] not in kept
    assert conversations[-1] in kept

    # It needs more than what is free while the others are retained.
    assert await decode.blocks() + 14_000 // 32 > NUM_BLOCKS
    large = await generate(world, world.tokens(14_000), world.conversation())
    assert len(large.token_ids) == ANSWER
    still = {pin.conversation.key.conversation_id for pin in await decode.owned()}
    assert len(kept - still) >= 1
