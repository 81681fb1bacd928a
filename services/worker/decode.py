"""The decode leg: the engine's answer, streamed, and the turn's handle committed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, replace
from typing import Protocol

import structlog

from kvloop.errors import KvloopError
from services.common import history_digest
from services.worker import chunks, response_events
from services.worker.answer import AnswerReader
from services.worker.chunks import Chunk, Usage
from services.worker.commits import CommitOutcome, CommitResult, TurnCommitter
from services.worker.decode_body import DecodeBody, rest_of_body
from services.worker.engine import DONE, Api, BegunRequest, Engine
from services.worker.event_hub import EventHub, TurnWatch
from services.worker.ledger import Conversation
from services.worker.metrics import WorkerMetrics
from services.worker.prepared_request import finish

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class DecodeOrder:
    """One decode leg to run."""

    turn_id: str
    api: Api
    body: DecodeBody
    """The client's body, without params."""
    params: bytes
    """What the prefill leg handed over; empty if there was none."""
    conversation: Conversation | None
    """Where to commit the turn; None: nothing is retained."""
    history: bytes = b""
    """Digest of the request's messages, if the conversation's id is to be derived
    from them and the answer; empty if it has an id."""
    whole: bool = False
    """Ask the engine for its reply in one piece."""
    begun: BegunRequest | None = None
    """The request to the engine, if it has the body without params already. Whoever
    gives the order closes it."""

    @property
    def head(self) -> bytes:
        """See `DecodeBody.head`."""
        return self.body.head


@dataclass(frozen=True)
class DecodeSummary:
    """How a decode leg ended."""

    usage: Usage
    commit: CommitResult
    chunks: list[bytes]
    """Those that end the answer; none if it had no end."""


class _Reader(Protocol):
    """Puts the answer together from what the engine writes."""

    def add(self, piece: bytes) -> None:
        """Take in one event, or the whole reply."""

    def messages(self) -> list[history_digest.Message] | None:
        """The answer so far, as messages; None if a piece could not be read."""


@dataclass(frozen=True)
class _Form:
    """How an endpoint writes its answers."""

    read_event: Callable[[bytes], Chunk]
    read_whole: Callable[[bytes], Chunk]
    reader: Callable[[], _Reader]


_CHOICES = _Form(chunks.read_chunk, chunks.read_whole, AnswerReader)
_FORMS: Mapping[Api, _Form] = {
    Api.CHAT_COMPLETIONS: _CHOICES,
    Api.COMPLETIONS: _CHOICES,
    Api.RESPONSES: _Form(
        response_events.read_event, response_events.read_whole, response_events.ResponseReader
    ),
}


class _Passage:
    """Tells chunks that may go on from those that may be the answer's end, in order.

    Args:
        forward_usage: whether chunks with nothing but the usage go on at all.
    """

    def __init__(self, *, forward_usage: bool) -> None:
        self._forward_usage = forward_usage
        self.ready: list[bytes] = []
        """Those that may go on now."""
        self.ending: list[bytes] = []
        """Those behind them, which end the answer unless another choice goes on."""

    def enter(self, chunk: Chunk) -> None:
        """Take in the next chunk."""
        if not (chunk.ends_answer or chunk.only_usage):
            self.ready += (*self.ending, chunk.json)
            self.ending = []
        elif self._forward_usage or not chunk.only_usage:
            self.ending.append(chunk.json)

    def go_on(self) -> list[bytes]:
        """Those that may go on, which are no longer here then."""
        ready, self.ready = self.ready, []
        return ready


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

    async def run(self, order: DecodeOrder) -> AsyncGenerator[list[bytes] | DecodeSummary, None]:
        """Run one leg: chunks as the engine wrote them, or its one reply, then the summary.

        Chunks that arrived together come together, and nothing waits for more of
        them. The chunk that ends the answer is held back until the turn's handle is
        in the ledger or surely will not be, so that whoever has the whole answer can
        use the handle; then it comes with the summary, as engines write nothing more
        but the usage. Closing the iterator aborts the engine's request.

        Raises:
            InvalidFieldError: the body or the params are at fault.
            KvloopError: as for the Engine port, also in the middle.
        """
        form = _FORMS[order.api]
        if order.params:
            order.body.require_splittable()
        # Several sequences would leave several handles, of which the next turn
        # continues one at most.
        retain = order.conversation is not None and order.body.unsplittable is None
        rest = rest_of_body(turn_id=order.turn_id, params=order.params, retain=retain)
        usage = Usage()
        commit: CommitResult | None = None
        answer = form.reader() if order.history and retain else None
        passage = _Passage(forward_usage=order.body.forward_usage)
        with self._hub.watch(order.turn_id) as watch:
            try:
                async with aclosing(self._arrivals(order, rest, form)) as arrivals:
                    async for arrived in arrivals:
                        for chunk in arrived:
                            usage = chunk.usage or usage
                            if answer is not None:
                                answer.add(chunk.json)
                            if chunk.ends_answer and commit is None:
                                if passage.ready:
                                    yield passage.go_on()
                                commit = await self._commit(watch, order, retain, answer)
                            passage.enter(chunk)
                        if passage.ready:
                            yield passage.go_on()
            except KvloopError:
                if passage.ready or passage.ending:  # what came before the error
                    yield passage.go_on() + passage.ending
                raise
            if commit is None:
                commit = await self._commit(watch, order, retain, answer)
        self._metrics.commits.labels(outcome=commit.outcome).inc()
        yield DecodeSummary(usage, commit, passage.ending)

    async def _arrivals(
        self, order: DecodeOrder, rest: bytes, form: _Form
    ) -> AsyncGenerator[Iterable[Chunk], None]:
        """Chunks that arrived together; each is read when it is its turn."""
        if order.whole:
            yield (form.read_whole(await self._complete(order, rest)),)
            return
        async with await self._stream(order, rest) as batches:
            async for batch in batches:
                yield (form.read_event(payload) for payload in batch if payload != DONE)

    async def _complete(self, order: DecodeOrder, rest: bytes) -> bytes:
        begun = await finish(order.begun, rest, self._metrics)
        if begun is not None:
            return await begun.complete()
        return await self._engine.complete(order.api, order.head + rest)

    async def _stream(
        self, order: DecodeOrder, rest: bytes
    ) -> AbstractAsyncContextManager[AsyncIterator[Sequence[bytes]]]:
        begun = await finish(order.begun, rest, self._metrics)
        if begun is not None:
            return begun.stream()
        return self._engine.stream(order.api, order.head + rest)

    async def _commit(
        self, watch: TurnWatch, order: DecodeOrder, retain: bool, answer: _Reader | None
    ) -> CommitResult:
        conversation = order.conversation
        if conversation is None:
            return CommitResult(CommitOutcome.NOT_REQUESTED)
        if not retain:
            return CommitResult(CommitOutcome.NOT_PINNED)
        if answer is not None:
            said = answer.messages()
            if said is None:
                _log.warning("answer_not_readable", turn_id=order.turn_id)
                return CommitResult(CommitOutcome.NOT_REQUESTED)
            digest = history_digest.extend_all(order.history, said)
            conversation = replace(
                conversation, conversation_id=history_digest.conversation_id(digest), turn=0
            )
        return await self._committer.commit(watch, conversation)
