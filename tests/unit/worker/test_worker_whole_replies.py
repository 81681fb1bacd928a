"""Decode legs whose answer comes in one piece, and conversations without an id."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvloop.errors import InvalidFieldError
from services.common import history_digest
from services.common.history_digest import conversation_id, extend, start
from services.worker.chunks import Usage
from services.worker.commits import CommitLimits, CommitOutcome, TurnCommitter
from services.worker.decode import DecodeLeg, DecodeOrder, DecodeSummary
from services.worker.decode_body import read_decode_body
from services.worker.engine import DONE, Api
from services.worker.event_hub import EventHub
from services.worker.ledger import Conversation
from services.worker.metrics import WorkerMetrics
from services.worker.tasks import background_tasks
from tests.unit.worker.fake_vllm import chunk, usage_chunk
from tests.unit.worker.fakes import (
    ENGINE,
    PARAMS,
    FakeClock,
    FakeEngine,
    FakeLedger,
    FakeLink,
    finished,
    hello,
)

pytestmark = pytest.mark.asyncio(loop_factories=["leaping"])

BODY = b'{"model":"tiny","messages":[{"role":"user","content":"hi"}],"x":1.50}'
CONVERSATION = Conversation("default", "tiny", "c1", turn=3)
HISTORY = start()


class _FinishingEngine(FakeEngine):
    """Its connector reports the end of the turn before a reply comes."""

    hub: EventHub

    async def complete(self, api: Api, body: bytes) -> bytes:
        reply = await super().complete(api, body)
        self.hub.finished(ENGINE, finished())
        return reply


@pytest.fixture
def engine() -> _FinishingEngine:
    return _FinishingEngine()


@pytest.fixture
def ledger() -> FakeLedger:
    return FakeLedger()


@pytest.fixture
async def leg(engine: _FinishingEngine, ledger: FakeLedger) -> AsyncIterator[DecodeLeg]:
    metrics, clock = WorkerMetrics(), FakeClock()
    engine.hub = EventHub(clock, metrics)
    engine.hub.connected(hello(), FakeLink())
    limits = CommitLimits(
        event_timeout_seconds=0.1, commit_timeout_seconds=0.1, settle_timeout_seconds=1
    )
    async with background_tasks() as tasks:
        committer = TurnCommitter("decode-0", ledger, engine.hub, clock, metrics, tasks, limits)
        yield DecodeLeg(engine, engine.hub, committer, metrics)


def _order(**changes: Any) -> DecodeOrder:
    whole = changes.pop("whole", True)
    body = read_decode_body(Api.CHAT_COMPLETIONS, BODY, whole=whole)
    order = DecodeOrder("turn-1", Api.CHAT_COMPLETIONS, body, b"", CONVERSATION, whole=whole)
    return replace(order, **changes)


def _reply(content: Any = "hello", **message: Any) -> bytes:
    said = {"role": "assistant", "content": content, **message}
    choice = {"index": 0, "message": said, "logprobs": None, "finish_reason": "stop"}
    usage = {"prompt_tokens": 5, "total_tokens": 7, "completion_tokens": 2}
    return msgspec.json.encode({"id": "1", "choices": [choice], "usage": usage})


async def _run(leg: DecodeLeg, order: DecodeOrder) -> tuple[list[bytes], DecodeSummary]:
    *chunks, summary = [event async for event in leg.run(order)]
    assert isinstance(summary, DecodeSummary)
    passed = [chunk for event in chunks if isinstance(event, list) for chunk in event]
    return [*passed, *summary.chunks], summary


async def test_a_whole_reply_is_one_chunk_less_its_params(
    engine: _FinishingEngine, leg: DecodeLeg
) -> None:
    reply = _reply(None, refusal=None)
    engine.replies = [reply[:-1] + b',"kv_transfer_params":{"remote_host":"10.0.0.1"}}']
    chunks, summary = await _run(leg, _order())
    assert chunks == [reply]
    assert summary.usage == Usage(5, 2)
    assert summary.commit.outcome is CommitOutcome.COMMITTED


async def test_the_body_of_a_whole_reply_reaches_the_engine_as_it_is(
    engine: _FinishingEngine, leg: DecodeLeg
) -> None:
    engine.replies = [_reply()]
    await _run(leg, _order(params=PARAMS))
    assert b'"x":1.50' in engine.raw_bodies[0]
    assert not engine.bodies[0].keys() & {"stream", "stream_options"}
    assert engine.bodies[0]["kv_transfer_params"]["kvloop_turn_id"] == "turn-1"


async def test_nothing_is_added_to_a_body_that_neither_pulls_nor_retains(
    engine: _FinishingEngine, leg: DecodeLeg
) -> None:
    engine.replies = [_reply()]
    _, summary = await _run(leg, _order(conversation=None))
    assert engine.raw_bodies == [BODY]
    assert summary.commit.outcome is CommitOutcome.NOT_REQUESTED


async def test_a_whole_reply_is_sent_after_its_commit(
    engine: _FinishingEngine, leg: DecodeLeg, ledger: FakeLedger
) -> None:
    engine.replies = [_reply()]
    events = leg.run(_order())
    end = await anext(events)
    assert isinstance(end, DecodeSummary)
    assert end.chunks == [_reply()]
    assert len(ledger.stored) == 1
    await events.aclose()


CALLS = [{"index": 0, "id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"content": "hello"}, history_digest.answer("hello")),
        ({"content": None, "tool_calls": CALLS}, history_digest.answer("", [("f", "{}")])),
        ({"content": "x", "reasoning": "hmm"}, history_digest.answer("x")),
    ],
)
async def test_a_conversation_without_an_id_is_committed_under_its_history(
    engine: _FinishingEngine,
    leg: DecodeLeg,
    ledger: FakeLedger,
    message: dict[str, Any],
    said: history_digest.Message,
) -> None:
    engine.replies = [_reply(**message)]
    await _run(leg, _order(history=HISTORY))
    (commit,) = ledger.stored
    assert commit.conversation == Conversation(
        "default", "tiny", conversation_id(extend(HISTORY, said)), turn=0
    )


async def test_a_stream_and_a_whole_reply_give_the_same_id(
    engine: _FinishingEngine, leg: DecodeLeg, ledger: FakeLedger
) -> None:
    engine.replies = [_reply("hello there")]
    await _run(leg, _order(history=HISTORY))

    def report() -> None:
        engine.hub.finished(ENGINE, finished(turn_id="turn-2"))

    engine.script = [
        chunk("hello"),
        chunk(" there"),
        report,
        chunk("", "stop"),
        usage_chunk(),
        DONE,
    ]
    await _run(leg, _order(turn_id="turn-2", history=HISTORY, whole=False))
    first, second = (commit.conversation.conversation_id for commit in ledger.stored)
    assert first == second


async def test_calls_that_come_in_pieces_are_put_together(
    engine: _FinishingEngine, leg: DecodeLeg, ledger: FakeLedger
) -> None:
    def delta(*calls: dict[str, Any], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": {"tool_calls": calls}, "finish_reason": finish_reason}
        return msgspec.json.encode({"choices": [choice]})

    engine.script = [
        delta({"index": 0, "id": "a", "function": {"name": "f", "arguments": ""}}),
        delta({"index": 0, "function": {"arguments": '{"a"'}}),
        delta({"index": 1, "id": "b", "function": {"name": "g", "arguments": "{}"}}),
        delta({"index": 0, "function": {"arguments": ": 1}"}}),
        lambda: engine.hub.finished(ENGINE, finished()),
        delta(finish_reason="tool_calls"),
        DONE,
    ]
    await _run(leg, _order(history=HISTORY, whole=False))
    said = history_digest.answer("", [("f", '{"a":1}'), ("g", "{}")])
    assert ledger.stored[0].conversation.conversation_id == conversation_id(extend(HISTORY, said))


async def test_an_answer_that_cannot_be_read_is_passed_on_and_not_committed(
    engine: _FinishingEngine, leg: DecodeLeg, ledger: FakeLedger
) -> None:
    engine.replies = [b'{"choices":[{"message":{"content":7}}]}']
    chunks, summary = await _run(leg, _order(history=HISTORY))
    assert chunks == [b'{"choices":[{"message":{"content":7}}]}']
    assert summary.commit.outcome is CommitOutcome.NOT_REQUESTED
    assert ledger.stored == []


async def test_a_refusal_of_the_engine_carries_its_body(
    engine: _FinishingEngine, leg: DecodeLeg
) -> None:
    engine.replies = [InvalidFieldError("no", http_status=400, engine_body="{}")]
    with pytest.raises(InvalidFieldError) as caught:
        await _run(leg, _order())
    assert caught.value.metadata["engine_body"] == "{}"
