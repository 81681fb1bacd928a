"""A router that answers what a test told it to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from google.protobuf.duration_pb2 import Duration

from kvloop.common.v1 import common_pb2
from kvloop.router.v1 import router_pb2, router_pb2_grpc
from services.common import rpc_server


class FakeRouter(router_pb2_grpc.RouterServiceServicer):
    """Streams `chunks`, then `result`; or hangs, or raises, as set.

    Attributes:
        chunks: JSON of each chunk to send.
        together: chunks in one event at most.
        result: last event; None leaves it out.
        result_in_batch: it comes with the last chunks.
        error: raised after the chunks.
        hang: never end after the chunks.
        requests: every request received.
        metadata: that of the last turn.
        cancelled: set when a hanging call was cancelled.
    """

    def __init__(self) -> None:
        self.chunks: list[dict[str, Any]] = []
        self.together = 1
        self.result: router_pb2.TurnResult | None = router_pb2.TurnResult()
        self.result_in_batch = False
        self.error: Exception | None = None
        self.hang = False
        self.models: list[router_pb2.Model] = []
        self.requests: list[Any] = []
        self.metadata: dict[str, str | bytes] = {}
        self.cancelled = asyncio.Event()

    async def Chat(self, request, context):
        self._begin(context)
        async for event in self._turn(request, router_pb2.ChatResponse):
            yield event

    async def Generate(self, request, context):
        self._begin(context)
        async for event in self._turn(request, router_pb2.GenerateResponse):
            yield event

    def _begin(self, context: Any) -> None:
        self.metadata = dict(context.invocation_metadata())
        if self.hang:  # which nothing else ends, wherever the call is by then
            context.add_done_callback(lambda _: self.cancelled.set())

    async def _turn(self, request, response: Any):
        self.requests.append(request)
        encoded = [json.dumps(chunk).encode() for chunk in self.chunks]
        for start in range(0, len(encoded), self.together):
            batch = encoded[start : start + self.together]
            if self.result_in_batch and start + self.together >= len(encoded):
                end = router_pb2.ChunkBatch(chunks_json=batch, result=self.result)
                yield response(batch=end)
                return
            if len(batch) > 1:
                yield response(batch=router_pb2.ChunkBatch(chunks_json=batch))
            else:
                yield response(chunk=router_pb2.Chunk(json=batch[0]))
        if self.hang:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        if self.result is not None:
            yield response(result=self.result)

    async def EndConversation(self, request, context):
        self.requests.append(request)
        return router_pb2.EndConversationResponse(found=True, released=True)

    async def ListModels(self, request, context):
        return router_pb2.ListModelsResponse(models=self.models)

    async def ExplainRoute(self, request, context):
        self.requests.append(request)
        return router_pb2.ExplainRouteResponse(
            candidates=[
                router_pb2.Candidate(
                    worker_id="prefill-0",
                    role=common_pb2.WORKER_ROLE_PREFILL,
                    in_flight=2,
                    score=2.0,
                    chosen=True,
                    reason="least load",
                )
            ],
            handle_available=False,
            miss_reason=common_pb2.MISS_REASON_FIRST_TURN,
        )


def chat_chunk(content: str | None = None, **choice: Any) -> dict[str, Any]:
    """A chat.completion.chunk with one choice; delta members beside `content` by name."""
    finish_reason = choice.pop("finish_reason", None)
    token_ids = choice.pop("token_ids", None)
    delta = {"content": content, **choice}
    return {
        "id": "x",
        "object": "chat.completion.chunk",
        "choices": [
            {
                "index": 0,
                "delta": delta,
                "finish_reason": finish_reason,
                "token_ids": token_ids,
                "logprobs": None,
            }
        ],
    }


def turn_result(
    *, pulled: int = 0, recomputed: int = 100, turn: int = 1, miss: str | None = "FIRST_TURN"
) -> router_pb2.TurnResult:
    """A result whose receipt reports the given prompt."""
    reason = common_pb2.MissReason.Value(f"MISS_REASON_{miss or 'UNSPECIFIED'}")
    return router_pb2.TurnResult(
        usage=common_pb2.Usage(prompt_tokens=pulled + recomputed, completion_tokens=2),
        receipt=router_pb2.Receipt(
            turn_id="t1",
            turn=turn,
            prefill_worker_id="prefill-0",
            decode_worker_id="decode-0",
            handle_hit=pulled > 0,
            miss_reason=reason,
            prefill=common_pb2.PrefillReport(
                prompt_tokens=pulled + recomputed,
                proven_tokens=pulled,
                pulled_tokens=pulled,
                recomputed_tokens=recomputed,
            ),
            ttft=Duration(nanos=250_000_000),
            prefill_leg=Duration(nanos=200_000_000),
            decode_leg=Duration(nanos=50_000_000),
            retain_outcome=router_pb2.RETAIN_OUTCOME_RETAINED,
            retained_tokens=pulled + recomputed + 1,
            retained_ttl=Duration(seconds=470),
        ),
        client_request_id="mine",
    )


@asynccontextmanager
async def serve_router(router: FakeRouter) -> AsyncIterator[str]:
    """Serve it on a free port; yields its address."""
    async with rpc_server.serve(
        "127.0.0.1:0",
        lambda server: router_pb2_grpc.add_RouterServiceServicer_to_server(router, server),
        [router_pb2.DESCRIPTOR.services_by_name["RouterService"]],
        grace_seconds=0,
    ) as port:
        yield f"127.0.0.1:{port}"
