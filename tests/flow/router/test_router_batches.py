"""Chunks that arrived together go on together, the end with the result, to those who accept it."""

from __future__ import annotations

import pytest

from kvloop.router.v1 import router_pb2
from tests.flow.router.stack import chat_request, running


@pytest.mark.parametrize(
    ("accept", "kinds"),
    [(True, ["batch"]), (False, ["chunk", "chunk", "result"])],
)
async def test_a_batch_goes_on_as_one_or_as_chunks(accept, kinds) -> None:
    async with running() as stack:
        stack["d0"].batches = True
        request = chat_request("c", accept_batches=accept)
        events = [event async for event in stack.stub.Chat(request)]
        assert [event.WhichOneof("event") for event in events] == kinds
        chunks = [*events[0].batch.chunks_json] or [event.chunk.json for event in events[:-1]]
        assert chunks == stack["d0"].chunks
        result = events[-1].batch.result if accept else events[-1].result
        assert result.receipt.ttft.ToNanoseconds() > 0
        assert result.usage.completion_tokens == 2


@pytest.mark.parametrize("accept", [True, False])
async def test_completions_have_batches_too(accept: bool) -> None:
    async with running() as stack:
        stack["d0"].batches = True
        request = router_pb2.GenerateRequest(
            model="tiny", token_ids_json=b"[1, 2, 3]", accept_batches=accept
        )
        events = [event async for event in stack.stub.Generate(request)]
        assert len(events) == (1 if accept else 3)
        assert stack["p0"].prefills[0].body_json == b'{"model":"tiny","prompt":[1, 2, 3]}'


async def test_workers_are_told_where_the_prompt_lies() -> None:
    async with running() as stack:
        await stack.chat("c")
        for leg in (stack["p0"].prefills[0], stack["d0"].decodes[0]):
            value = leg.body_json[leg.prompt.start : leg.prompt.end]
            assert value == b'[{"role":"user","content":"hello"}]'
