"""The gRPC edge of the ledger: convert, one call, convert back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from kvloop.kvmeta.v1 import ledger_pb2, ledger_pb2_grpc
from services.common import tracing
from services.common.span_attributes import HANDLE_HIT, TURN_NUMBER, miss_attributes
from services.kvmeta import bounds, paging
from services.kvmeta.conversion import (
    commit_from_proto,
    conversation_to_proto,
    duration,
    engine_from_proto,
    hit_to_proto,
    key_from_proto,
    miss_reason_to_proto,
    release_to_proto,
    request_id_from_proto,
)
from services.kvmeta.ledger import Ledger
from services.kvmeta.model import Conversation
from services.kvmeta.pin_conversion import (
    held_pins_from_proto,
    pin_filter_from_proto,
    pin_status_to_proto,
    pin_to_proto,
    turn_ids_from_proto,
)
from services.kvmeta.store import Miss, PinPosition, Position

_Context = grpc.aio.ServicerContext[Any, Any]


class LedgerService(ledger_pb2_grpc.LedgerServiceServicer):
    """LedgerService over a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def TakeHandle(
        self, request: ledger_pb2.TakeHandleRequest, context: _Context
    ) -> ledger_pb2.TakeHandleResponse:
        """Open a turn and take the handle."""
        outcome = await self._ledger.take(
            key_from_proto(request.key), request_id_from_proto(request.request_id)
        )
        span = tracing.current()
        if isinstance(outcome, Miss):
            reason = miss_reason_to_proto(outcome.reason)
            span.tell({HANDLE_HIT: False, TURN_NUMBER: outcome.turn, **miss_attributes(reason)})
            return ledger_pb2.TakeHandleResponse(
                turn=outcome.turn,
                miss_reason=reason,
                last_worker_id=outcome.last_worker_id,
            )
        span.tell({HANDLE_HIT: True, TURN_NUMBER: outcome.hit.turn})
        return ledger_pb2.TakeHandleResponse(
            turn=outcome.hit.turn,
            handle=hit_to_proto(outcome.hit),
            remaining_ttl=duration(outcome.remaining_us),
            last_worker_id=outcome.hit.conversation.worker_id,
        )

    async def CommitTurn(
        self, request: ledger_pb2.CommitTurnRequest, context: _Context
    ) -> ledger_pb2.CommitTurnResponse:
        """Store a finished turn's handle."""
        committed = await self._ledger.commit(commit_from_proto(request))
        return ledger_pb2.CommitTurnResponse(
            handle_id=committed.conversation.handle_id,
            granted_ttl=duration(committed.granted_us),
            revision=committed.conversation.commit_revision,
        )

    async def ReturnHandle(
        self, request: ledger_pb2.ReturnHandleRequest, context: _Context
    ) -> ledger_pb2.ReturnHandleResponse:
        """Take a handle back."""
        revision = await self._ledger.give_back(
            key_from_proto(request.key),
            bounds.text(request.handle_id, "handle_id", most=bounds.MAX_HANDLE_ID),
            request_id_from_proto(request.request_id),
        )
        return ledger_pb2.ReturnHandleResponse(revision=revision)

    async def ReleaseConversation(
        self, request: ledger_pb2.ReleaseConversationRequest, context: _Context
    ) -> ledger_pb2.ReleaseConversationResponse:
        """End a conversation."""
        ended = await self._ledger.end(key_from_proto(request.key))
        return ledger_pb2.ReleaseConversationResponse(found=ended.found, released=ended.released)

    async def ExtendConversation(
        self, request: ledger_pb2.ExtendConversationRequest, context: _Context
    ) -> ledger_pb2.ExtendConversationResponse:
        """Set a conversation's TTL."""
        granted = await self._ledger.extend(
            key_from_proto(request.key), bounds.duration_us(request.ttl, "ttl")
        )
        return ledger_pb2.ExtendConversationResponse(granted_ttl=duration(granted))

    async def GetConversation(
        self, request: ledger_pb2.GetConversationRequest, context: _Context
    ) -> ledger_pb2.GetConversationResponse:
        """Read one conversation."""
        row = await self._ledger.get(key_from_proto(request.key))
        return ledger_pb2.GetConversationResponse(
            conversation=self._conversation(row, self._ledger.now_us())
        )

    async def ListConversations(
        self, request: ledger_pb2.ListConversationsRequest, context: _Context
    ) -> ledger_pb2.ListConversationsResponse:
        """List a tenant's conversations."""
        tenant = bounds.text(request.tenant, "tenant", most=bounds.MAX_TENANT)
        model = bounds.optional_text(request.model, "model", most=bounds.MAX_MODEL) or None
        size = bounds.page_size(request.page_size)
        query = [tenant, model or ""]
        after = paging.conversation_position(query, request.page_token)
        rows = await self._ledger.page(tenant, model, after, size + 1)
        token = ""
        if len(rows) > size:
            last = rows[size - 1]
            position = Position(last.commit_time_us, last.key.model, last.key.conversation_id)
            token = paging.conversation_token(query, position)
        now_us = self._ledger.now_us()
        return ledger_pb2.ListConversationsResponse(
            conversations=[self._conversation(row, now_us) for row in rows[:size]],
            next_page_token=token,
        )

    async def RenewPins(
        self, request: ledger_pb2.RenewPinsRequest, context: _Context
    ) -> ledger_pb2.RenewPinsResponse:
        """Say what shall become of a worker's pins."""
        worker_id = bounds.text(request.worker_id, "worker_id", most=bounds.MAX_WORKER_ID)
        engine = engine_from_proto(request.engine, "engine")
        bounds.count(request.pins, "pins", least=0, most=bounds.MAX_PINS)
        pins = held_pins_from_proto(request.pins)
        statuses = await self._ledger.check_pins(worker_id, engine, pins)
        return ledger_pb2.RenewPinsResponse(pins=map(pin_status_to_proto, statuses))

    async def EvictHandles(
        self, request: ledger_pb2.EvictHandlesRequest, context: _Context
    ) -> ledger_pb2.EvictHandlesResponse:
        """Take handles back to make room."""
        worker_id = bounds.text(request.worker_id, "worker_id", most=bounds.MAX_WORKER_ID)
        engine = engine_from_proto(request.engine, "engine")
        bounds.count(request.turn_ids, "turn_ids", least=1, most=bounds.MAX_EVICTED)
        turn_ids = turn_ids_from_proto(request.turn_ids)
        evicted = await self._ledger.evict(worker_id, engine, turn_ids)
        return ledger_pb2.EvictHandlesResponse(evicted_turn_ids=evicted)

    async def ListPins(
        self, request: ledger_pb2.ListPinsRequest, context: _Context
    ) -> ledger_pb2.ListPinsResponse:
        """List what workers retain."""
        which = pin_filter_from_proto(request)
        size = bounds.page_size(request.page_size)
        query = [which.worker_id or "", which.tenant or "", which.model or ""]
        after = paging.pin_position(query, request.page_token)
        pins = await self._ledger.pins(which, after, size + 1)
        token = ""
        if len(pins) > size:
            last = pins[size - 1].conversation
            position = PinPosition(last.worker_id, last.commit_time_us, last.key)
            token = paging.pin_token(query, position)
        now_us = self._ledger.now_us()
        return ledger_pb2.ListPinsResponse(
            pins=[
                pin_to_proto(pin, now_us, self._ledger.given_out_until_us(pin.conversation))
                for pin in pins[:size]
            ],
            next_page_token=token,
        )

    async def WatchReleases(
        self, request: ledger_pb2.WatchReleasesRequest, context: _Context
    ) -> AsyncIterator[ledger_pb2.WatchReleasesResponse]:
        """Stream one worker's releases."""
        worker_id = bounds.text(request.worker_id, "worker_id", most=bounds.MAX_WORKER_ID)
        async with aclosing(
            self._ledger.watch_releases(worker_id, request.after_revision)
        ) as releases:
            async for release in releases:
                yield release_to_proto(release)

    def _conversation(self, row: Conversation, now_us: int) -> ledger_pb2.Conversation:
        return conversation_to_proto(row, now_us, self._ledger.given_out_until_us(row))
