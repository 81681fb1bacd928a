"""The gRPC edge: requests to orders, results to replies."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import grpc

from kvloop.common.v1 import common_pb2
from kvloop.durations import to_duration, to_seconds
from kvloop.errors import InvalidFieldError, PreconditionError, UnsupportedError
from kvloop.kvmeta.v1 import registry_pb2
from kvloop.worker.v1 import worker_pb2, worker_pb2_grpc
from services.common import rpc_tracing, tracing
from services.common.history_digest import DIGEST_BYTES
from services.common.span_attributes import (
    COMPLETION_TOKENS,
    PROMPT_TOKENS,
    TURN_ID,
    miss_attributes,
    report_attributes,
)
from services.worker.admission import Admission
from services.worker.decode import DecodeLeg, DecodeOrder, DecodeSummary
from services.worker.decode_body import read_decode_body
from services.worker.engine import Api, Engine, EngineModel
from services.worker.engine_command import Role
from services.worker.event_hub import EventHub
from services.worker.event_messages import EngineRef, Hello, request_id_of
from services.worker.ledger import Conversation
from services.worker.legs import Prompt, parse_body, prompt_token_ids, tokenize_body
from services.worker.pins import ReleaseCause
from services.worker.prefill import PrefillLeg, PrefillOrder
from services.worker.prefill_body import read_prefill_body
from services.worker.preparations import Preparations
from services.worker.pull_costs import PullCosts
from services.worker.pull_messages import (
    link_estimate,
    prefill_report,
    pull_estimate,
    tokens_per_second,
)
from services.worker.registration import Registration

_APIS = {
    common_pb2.API_CHAT_COMPLETIONS: Api.CHAT_COMPLETIONS,
    common_pb2.API_COMPLETIONS: Api.COMPLETIONS,
    common_pb2.API_RESPONSES: Api.RESPONSES,
}
_PROMPT_MEMBERS = {
    common_pb2.API_CHAT_COMPLETIONS: "messages",
    common_pb2.API_COMPLETIONS: "prompt",
    common_pb2.API_RESPONSES: "input",
}
_MAX_TURN_ID = 64
_MAX_RELEASES = 1000

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True)
class WorkerParts:
    """What the edge calls."""

    role: Role
    model: EngineModel
    engine: Engine
    hub: EventHub
    admission: Admission
    registration: Registration
    costs: PullCosts
    prefill: PrefillLeg
    decode: DecodeLeg
    prepared_prefill: Preparations[PrefillOrder]
    prepared_decode: Preparations[DecodeOrder]
    record: Callable[[Hello], registry_pb2.Worker]
    """Makes the worker's record as registered."""


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """Implements kvloop.worker.v1.WorkerService."""

    def __init__(self, parts: WorkerParts) -> None:
        self._parts = parts

    async def Prefill(
        self, request: worker_pb2.PrefillRequest, context: Context
    ) -> worker_pb2.PrefillResponse:
        """Run the prefill leg."""
        self._require_role("prefill")
        span = tracing.current()
        span.tell({TURN_ID: _turn_id(request.turn_id)})
        with self._parts.admission.leg():
            async with self._prefill_order(request) as order:
                result = await self._parts.prefill.run(order)
        report = prefill_report(result.report)
        if span.recording:
            span.tell(report_attributes(report) | miss_attributes(report.miss_reason))
        return worker_pb2.PrefillResponse(transfer_params_json=result.params, report=report)

    async def PreparePrefill(
        self, request: worker_pb2.PreparePrefillRequest, context: Context
    ) -> worker_pb2.PreparePrefillResponse:
        """Keep a prefill leg's body until the leg is run."""
        self._require_role("prefill")
        leg = request.leg
        await self._parts.prepared_prefill.hold(
            _turn_id(leg.turn_id), partial(_early_prefill_order, leg), rpc_tracing.told_context(leg)
        )
        return worker_pb2.PreparePrefillResponse()

    async def Decode(
        self, request: worker_pb2.DecodeRequest, context: Context
    ) -> AsyncIterator[worker_pb2.DecodeResponse]:
        """Run the decode leg."""
        self._require_role("decode")
        span = tracing.current()
        span.tell({TURN_ID: _turn_id(request.turn_id)})
        with self._parts.admission.leg():
            async with (
                self._decode_order(request) as order,
                aclosing(self._parts.decode.run(order)) as events,
            ):
                async for event in events:
                    if isinstance(event, DecodeSummary):
                        span.tell(
                            {
                                PROMPT_TOKENS: event.usage.prompt_tokens,
                                COMPLETION_TOKENS: event.usage.completion_tokens,
                            }
                        )
                    for response in _responses(event, batches=request.accept_batches):
                        yield response

    async def PrepareDecode(
        self, request: worker_pb2.PrepareDecodeRequest, context: Context
    ) -> worker_pb2.PrepareDecodeResponse:
        """Keep a decode leg's body until the leg is run."""
        self._require_role("decode")
        leg = request.leg
        await self._parts.prepared_decode.hold(
            _turn_id(leg.turn_id), partial(_early_decode_order, leg), rpc_tracing.told_context(leg)
        )
        return worker_pb2.PrepareDecodeResponse()

    async def CountTokens(
        self, request: worker_pb2.CountTokensRequest, context: Context
    ) -> worker_pb2.CountTokensResponse:
        """Count a prompt's tokens."""
        api, members = _api(request.api), parse_body(request.body_json)
        if api is Api.RESPONSES:
            raise UnsupportedError(
                "engines do not tokenize the bodies of responses", reason="UNCOUNTABLE"
            )
        token_ids = prompt_token_ids(members) if api is Api.COMPLETIONS else None
        if token_ids is not None:  # /tokenize takes text only, and they are counted already
            return worker_pb2.CountTokensResponse(
                num_tokens=len(token_ids), max_model_len=self._parts.model.max_model_len
            )
        count = await self._parts.engine.tokenize(tokenize_body(members))
        return worker_pb2.CountTokensResponse(
            num_tokens=count.tokens, max_model_len=count.max_model_len
        )

    async def Tokenize(
        self, request: worker_pb2.TokenizeRequest, context: Context
    ) -> worker_pb2.TokenizeResponse:
        """Pass a request on to the engine's /tokenize."""
        parse_body(request.body_json)
        reply = await self._parts.engine.complete(Api.TOKENIZE, request.body_json)
        return worker_pb2.TokenizeResponse(reply_json=reply)

    async def ReleaseBlocks(
        self, request: worker_pb2.ReleaseBlocksRequest, context: Context
    ) -> worker_pb2.ReleaseBlocksResponse:
        """Pass releases on to the engine."""
        ref = _engine_ref(request.engine)
        if not 1 <= len(request.transfer_params_json) <= _MAX_RELEASES:
            raise InvalidFieldError(
                f"transfer_params_json needs 1 to {_MAX_RELEASES} entries",
                field="transfer_params_json",
            )
        identity = self._parts.hub.identity
        if identity is None or identity.ref != ref:
            return worker_pb2.ReleaseBlocksResponse(sent=0)
        named = [request_id_of(params) for params in request.transfer_params_json]
        request_ids = [request_id for request_id in named if request_id is not None]
        if request_ids:
            self._parts.hub.release(ref, request_ids, ReleaseCause.REQUESTED)
        return worker_pb2.ReleaseBlocksResponse(sent=len(request_ids))

    async def EstimatePull(
        self, request: worker_pb2.EstimatePullRequest, context: Context
    ) -> worker_pb2.EstimatePullResponse:
        """Say what a pull would take."""
        self._require_role("prefill")
        if request.num_tokens < 1:
            raise InvalidFieldError("num_tokens must be at least 1", field="num_tokens")
        engine = _engine_ref(request.engine)
        return pull_estimate(self._parts.costs.plan(engine, request.num_tokens))

    async def GetWorkerInfo(
        self, request: worker_pb2.GetWorkerInfoRequest, context: Context
    ) -> worker_pb2.GetWorkerInfoResponse:
        """Describe the worker."""
        gauges, pins = await self._parts.engine.gauges(), self._parts.hub.pins
        record = self._parts.record(await self._parts.hub.identity_after(None))
        if self._parts.admission.draining:
            record.state = registry_pb2.Worker.STATE_DRAINING
        return worker_pb2.GetWorkerInfoResponse(
            worker=record,
            in_flight=self._parts.admission.in_flight,
            engine_running=gauges.running,
            engine_waiting=gauges.waiting,
            kv_cache_usage=gauges.kv_cache_usage,
            registered=self._parts.registration.registered,
            retained_pins=len(pins),
            retained_blocks=pins.retained_blocks,
            orphan_pins=pins.num_orphans,
            links=[link_estimate(link) for link in self._parts.costs.links()],
            prefill_tokens_per_second=tokens_per_second(self._parts.costs.recompute),
        )

    @asynccontextmanager
    async def _prefill_order(
        self, request: worker_pb2.PrefillRequest
    ) -> AsyncIterator[PrefillOrder]:
        """The leg to run, prepared or not."""
        prepared = self._parts.prepared_prefill
        if request.prepared:
            async with prepared.claim(request.turn_id) as (order, begun):
                yield replace(_with_handle(order, request), begun=begun)
        else:
            prepared.discard(request.turn_id)
            yield _with_handle(_prefill_order(request), request)

    @asynccontextmanager
    async def _decode_order(self, request: worker_pb2.DecodeRequest) -> AsyncIterator[DecodeOrder]:
        """The leg to run, prepared or not."""
        prepared = self._parts.prepared_decode
        if request.prepared:
            async with prepared.claim(request.turn_id) as (order, begun):
                yield replace(order, params=request.transfer_params_json, begun=begun)
        else:
            prepared.discard(request.turn_id)
            yield _decode_order(request)

    def _require_role(self, role: Role) -> None:
        if self._parts.role != role:
            raise PreconditionError(
                f"this worker runs {self._parts.role} legs, not {role} legs", reason="WRONG_ROLE"
            )


def _require_no_params(leg: worker_pb2.PrefillRequest | worker_pb2.DecodeRequest) -> None:
    if leg.transfer_params_json:
        raise InvalidFieldError(
            "a leg is prepared before its params are known", field="leg.transfer_params_json"
        )


def _early_prefill_order(leg: worker_pb2.PrefillRequest) -> PrefillOrder:
    """What is known of a leg before its handle is."""
    _require_no_params(leg)
    return _prefill_order(leg)


def _early_decode_order(leg: worker_pb2.DecodeRequest) -> DecodeOrder:
    """What is known of a leg before its params are."""
    _require_no_params(leg)
    order = _decode_order(leg)
    order.body.require_splittable()
    return order


def _prefill_order(request: worker_pb2.PrefillRequest) -> PrefillOrder:
    api = _api(request.api)
    return PrefillOrder(
        turn_id=_turn_id(request.turn_id),
        api=api,
        head=read_prefill_body(api, request.body_json, _prompt(request)),
        handle=b"",
    )


def _with_handle(order: PrefillOrder, request: worker_pb2.PrefillRequest) -> PrefillOrder:
    """The order with what a request says beside its body."""
    return replace(
        order,
        handle=request.transfer_params_json,
        engine=_engine_ref(request.engine) if request.HasField("engine") else None,
        extension_seconds=max(to_seconds(request.deadline_extension), 0.0),
        hand_token_ids_over=request.hand_token_ids_over,
    )


def _decode_order(request: worker_pb2.DecodeRequest) -> DecodeOrder:
    api = _api(request.api)
    return DecodeOrder(
        turn_id=_turn_id(request.turn_id),
        api=api,
        body=read_decode_body(api, request.body_json, whole=request.whole, prompt=_prompt(request)),
        params=request.transfer_params_json,
        conversation=_conversation(request.commit) if request.HasField("commit") else None,
        history=request.commit.history_digest,
        whole=request.whole,
    )


def _turn_id(turn_id: str) -> str:
    if not 1 <= len(turn_id) <= _MAX_TURN_ID:
        raise InvalidFieldError(
            f"turn_id needs 1 to {_MAX_TURN_ID} characters, not {len(turn_id)}", field="turn_id"
        )
    return turn_id


def _engine_ref(engine: common_pb2.EngineRef) -> EngineRef:
    if not engine.engine_id or not engine.epoch:
        raise InvalidFieldError("engine is required", field="engine")
    return EngineRef(engine.engine_id, engine.epoch)


def _api(api: common_pb2.Api.ValueType) -> Api:
    if api not in _APIS:
        raise InvalidFieldError("api is required", field="api")
    return _APIS[api]


def _prompt(request: worker_pb2.PrefillRequest | worker_pb2.DecodeRequest) -> Prompt | None:
    if not request.HasField("prompt"):
        return None
    return Prompt(_PROMPT_MEMBERS[request.api], request.prompt.start, request.prompt.end)


def _conversation(commit: worker_pb2.TurnRef) -> Conversation:
    key = commit.key
    if commit.history_digest and len(commit.history_digest) != DIGEST_BYTES:
        raise InvalidFieldError(
            f"commit.history_digest needs {DIGEST_BYTES} bytes", field="commit.history_digest"
        )
    derived = bool(commit.history_digest)
    for name in ("tenant", "model", *(() if derived else ("conversation_id",))):
        if not getattr(key, name):
            raise InvalidFieldError(f"commit.key.{name} is required", field=f"commit.key.{name}")
    return Conversation(key.tenant, key.model, key.conversation_id, commit.turn)


def _responses(
    event: list[bytes] | DecodeSummary, *, batches: bool
) -> Iterator[worker_pb2.DecodeResponse]:
    """The messages for what a decode leg gave; with batches it is one."""
    summary = _summary(event) if isinstance(event, DecodeSummary) else None
    chunks = event.chunks if isinstance(event, DecodeSummary) else event
    if batches and (len(chunks) > 1 or (chunks and summary)):
        batch = worker_pb2.ChunkBatch(chunks_json=chunks, summary=summary)
        yield worker_pb2.DecodeResponse(batch=batch)
        return
    for chunk in chunks:
        yield worker_pb2.DecodeResponse(chunk_json=chunk)
    if summary is not None:
        yield worker_pb2.DecodeResponse(summary=summary)


def _summary(summary: DecodeSummary) -> worker_pb2.DecodeSummary:
    commit = summary.commit
    return worker_pb2.DecodeSummary(
        usage=common_pb2.Usage(
            prompt_tokens=summary.usage.prompt_tokens,
            completion_tokens=summary.usage.completion_tokens,
        ),
        commit_outcome=worker_pb2.CommitOutcome.Value(f"COMMIT_OUTCOME_{commit.outcome}"),
        retained_tokens=commit.retained_tokens,
        granted_ttl=to_duration(commit.granted_seconds),
    )
