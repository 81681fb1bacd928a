"""The decode leg: the engine's answer, streamed, and the turn's handle committed."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace

import structlog

from services.common import history_digest
from services.worker.answer import AnswerReader
from services.worker.chunks import Chunk, Usage, read_chunk, read_whole
from services.worker.commits import CommitOutcome, CommitResult, TurnCommitter
from services.worker.engine import DONE, Api, Engine
from services.worker.event_hub import EventHub, TurnWatch
from services.worker.ledger import Conversation
from services.worker.legs import (
    decode_body,
    parse_body,
    require_splittable,
    unsplittable_field,
    wants_usage_chunk,
    whole_decode_body,
)
from services.worker.metrics import WorkerMetrics

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class DecodeOrder:
    """One decode leg to run."""

    turn_id: str
    api: Api
    body: bytes
    """The client's body, a JSON object."""
    params: bytes
    """What the prefill leg handed over; empty if there was none."""
    conversation: Conversation | None
    """Where to commit the turn; None: nothing is retained."""
    history: bytes = b""
    """Digest of the request's messages, if the conversation's id is to be derived
    from them and the answer; empty if it has an id."""
    whole: bool = False
    """Ask the engine for its reply in one piece."""


@dataclass(frozen=True)
class DecodeSummary:
    """How a decode leg ended."""

    usage: Usage
    commit: CommitResult


class DecodeLeg:
    """Runs decode legs on one engine.

    Args:
        engine: a decode engine.
        hub: reports finished turns.
        committer: commits them.
        metrics: counts outcomes.
    """

    def __init__(
        self, engine: Engine, hub: EventHub, committer: TurnCommitter, metrics: WorkerMetrics
    ) -> None:
        self._engine = engine
        self._hub = hub
        self._committer = committer
        self._metrics = metrics

    async def run(self, order: DecodeOrder) -> AsyncGenerator[bytes | DecodeSummary, None]:
        """Run one leg: chunks as the engine wrote them, or its one reply, then the summary.

        The chunk that ends the answer, and what follows it, is held back until
        the turn's handle is in the ledger or surely will not be, so that
        whoever has the whole answer can use the handle. Closing the iterator
        aborts the engine's request.

        Raises:
            InvalidFieldError: the body or the params are at fault.
            KvloopError: as for the Engine port, also in the middle.
        """
        members = parse_body(order.body)
        if order.params:
            require_splittable(order.api, members)
        # Several sequences would leave several handles, of which the next turn
        # continues one at most.
        retain = order.conversation is not None and not unsplittable_field(order.api, members)
        make_body = whole_decode_body if order.whole else decode_body
        body = make_body(members, turn_id=order.turn_id, params=order.params, retain=retain)
        forward_usage = order.whole or wants_usage_chunk(members)
        usage = Usage()
        commit: CommitResult | None = None
        answer = AnswerReader() if order.history and retain else None
        with self._hub.watch(order.turn_id) as watch:
            async with aclosing(self._chunks(order, body)) as chunks:
                async for chunk in chunks:
                    usage = chunk.usage or usage
                    if answer is not None:
                        answer.add(chunk.json)
                    if chunk.ends_answer and commit is None:
                        commit = await self._commit(watch, order, retain, answer)
                    if forward_usage or not chunk.only_usage:
                        yield chunk.json
            if commit is None:
                commit = await self._commit(watch, order, retain, answer)
        self._metrics.commits.labels(outcome=commit.outcome).inc()
        yield DecodeSummary(usage, commit)

    async def _chunks(self, order: DecodeOrder, body: bytes) -> AsyncGenerator[Chunk, None]:
        if order.whole:
            yield read_whole(await self._engine.complete(order.api, body))
            return
        async with self._engine.stream(order.api, body) as batches:
            async for batch in batches:
                for payload in batch:
                    if payload != DONE:
                        yield read_chunk(payload)

    async def _commit(
        self, watch: TurnWatch, order: DecodeOrder, retain: bool, answer: AnswerReader | None
    ) -> CommitResult:
        conversation = order.conversation
        if conversation is None:
            return CommitResult(CommitOutcome.NOT_REQUESTED)
        if not retain:
            return CommitResult(CommitOutcome.NOT_PINNED)
        if answer is not None:
            said = answer.message()
            if said is None:
                _log.warning("answer_not_readable", turn_id=order.turn_id)
                return CommitResult(CommitOutcome.NOT_REQUESTED)
            digest = history_digest.extend(order.history, said)
            conversation = replace(
                conversation, conversation_id=history_digest.conversation_id(digest), turn=0
            )
        return await self._committer.commit(watch, conversation)
