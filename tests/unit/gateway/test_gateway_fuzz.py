"""Whatever comes in: no 500, no hang, no dropped or changed byte.

KVLOOP_FUZZ_CASES sets how many cases there are in all; `make test`, and so CI, runs
10,000, which take about half a minute. A run of pytest alone makes a few hundred.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from kvloop.common.v1 import common_pb2
from kvloop.errors import UnavailableError
from kvloop.router.v1 import router_pb2
from services.router.admission import AdmissionLimits, TurnAdmission
from services.router.deadline import Deadline
from services.router.gateway import sse
from services.router.gateway.http import BodyLimits
from services.router.gateway.requests import ReadingRules
from services.router.gateway.turns import TurnEndpoint, relay_stream
from services.router.keys import OpenDoor
from services.router.metrics import RouterMetrics
from services.router.reception import Reception
from services.router.request import TurnRequest
from services.router.turn import AnswerEnd
from services.worker.chunks import read_chunk
from services.worker.response_events import read_event
from services.worker.sse import SseParser
from tests.unit.gateway import bodies

CASES = int(os.environ.get("KVLOOP_FUZZ_CASES", "600"))
SEEDS = st.integers(0, 2**64 - 1)
CHUNK = b'{"choices":[]}'

pytestmark = pytest.mark.timeout(300)


def cases(share: float) -> settings:
    """That share of all cases."""
    return settings(
        max_examples=max(1, round(CASES * share)),
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


class _Pipeline:
    """Answers every turn with one chunk, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[TurnRequest] = []

    def new_turn_id(self) -> str:
        return "t"

    async def run(
        self, request: TurnRequest, deadline: Deadline, turn_id: str | None = None
    ) -> AsyncGenerator[Sequence[bytes] | AnswerEnd, None]:
        self.asked.append(request)
        yield [CHUNK]
        yield AnswerEnd((), router_pb2.TurnResult())


class _Gateway:
    """The endpoints without a network."""

    def __init__(self) -> None:
        self.pipeline = _Pipeline()
        reception = Reception(
            authenticator=OpenDoor(),
            admission=TurnAdmission(AdmissionLimits(0, 0, 1)),
            pipeline=self.pipeline,  # type: ignore[arg-type]
            metrics=RouterMetrics(CollectorRegistry()),
            clock=lambda: 0.0,
            max_turn_seconds=10,
            deadline_margin_seconds=0,
        )
        rules = ReadingRules(derive_conversations=True, tell_cached_tokens=True)
        self._endpoints = {
            api: TurnEndpoint(api, reception, rules, body_limits=BodyLimits(100_000, 5, 1e6))
            for api in bodies.APIS
        }
        self._loop = asyncio.new_event_loop()

    def close(self) -> None:
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something to its end."""
        self._loop.run_until_complete(work)

    def post(self, api: Any, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        """Status and body of the reply."""
        sent: list[Any] = []
        hung_up = asyncio.Event()
        pieces = [body[: len(body) // 2], body[len(body) // 2 :]]

        async def receive() -> dict[str, Any]:
            if pieces:
                piece = pieces.pop(0)
                return {"type": "http.request", "body": piece, "more_body": bool(pieces)}
            await hung_up.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/",
            "headers": [(k.encode(), v.encode("latin-1")) for k, v in headers.items()],
        }

        async def call() -> None:
            async with asyncio.timeout(20):
                await self._endpoints[api](scope, receive, send)

        self.run(call())
        assert sent[-1]["more_body"] is False
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


@pytest.fixture(scope="module")
def gateway() -> Iterator[_Gateway]:
    made = _Gateway()
    yield made
    made.close()


@cases(0.4)
@given(seed=SEEDS)
def test_any_body_is_answered_or_refused(gateway: _Gateway, seed: int) -> None:
    rng = random.Random(seed)
    api, body = bodies.body(rng)
    gateway.pipeline.asked.clear()
    status, reply = gateway.post(api, body, bodies.headers(rng))
    assert status in (200, 400), reply
    if status == 400:
        assert json.loads(reply)["error"]["message"]
        assert not gateway.pipeline.asked
        return
    end = b"" if api == common_pb2.API_RESPONSES else sse.DONE
    assert reply in (CHUNK, sse.event(CHUNK) + end)
    (turn,) = gateway.pipeline.asked
    wanted = {k: v for k, v in json.loads(body).items() if k not in bodies.OWN}
    assert json.loads(turn.body_json) == wanted
    assert "kv_transfer_params" not in wanted


@cases(0.4)
@given(
    seed=SEEDS,
    newline=st.sampled_from([b"\n", b"\r\n", b"\r"]),
    comments=st.booleans(),
    most=st.sampled_from([1, 2, 7, 100]),
)
def test_D6_every_event_comes_out_as_it_went_in(
    seed: int, newline: bytes, comments: bool, most: int
) -> None:
    rng = random.Random(seed)
    wanted = b"".join(sse.event(bodies.chunk(rng)) for _ in range(rng.randrange(6)))
    data = (b": ping\n\n" + wanted if comments else wanted).replace(b"\n", newline)
    parser = SseParser()
    events: list[bytes] = []
    start = 0
    while start < len(data):
        end = start + rng.randrange(1, most + 1)
        events += parser.feed(data[start:end])
        start = end
    events += parser.close()
    assert b"".join(sse.event(read_chunk(event).json) for event in events) == wanted


@cases(0.1)
@given(seed=SEEDS, most=st.sampled_from([1, 2, 7, 100]))
def test_D6_every_event_of_a_response_comes_out_as_it_went_in(seed: int, most: int) -> None:
    rng = random.Random(seed)
    framing = sse.ResponseFraming()
    payloads = [bodies.event(rng) for _ in range(rng.randrange(6))]
    data = b"".join(map(framing.event, payloads))
    parser = SseParser()
    events: list[bytes] = []
    start = 0
    while start < len(data):
        end = start + rng.randrange(1, most + 1)
        events += parser.feed(data[start:end])
        start = end
    assert [read_event(event).json for event in events] == payloads
    assert b"".join(map(framing.event, events)) == data


@cases(0.1)
@given(seed=SEEDS, fails=st.booleans())
def test_a_stream_ends_whole_or_with_an_error(gateway: _Gateway, seed: int, fails: bool) -> None:
    rng = random.Random(seed)
    chunks = [rng.randbytes(rng.randrange(40)) for _ in range(rng.randrange(4))]
    with_the_end = rng.random() < 0.5
    sent: list[Any] = []

    async def events() -> AsyncGenerator[Sequence[bytes] | AnswerEnd, None]:
        rest = list(chunks)
        while rest:
            together = rng.randrange(1, len(rest) + 1)
            if together == len(rest) and not fails and with_the_end:
                break
            yield rest[:together]
            del rest[:together]
        if fails:
            raise UnavailableError("gone")
        yield AnswerEnd(rest, router_pb2.TurnResult())

    async def send(message: Any) -> None:
        sent.append(message)

    gateway.run(relay_stream(events(), send, {}, sse.ChoiceFraming()))
    body = b"".join(message.get("body", b"") for message in sent)
    whole = b"".join(map(sse.event, chunks))
    assert sent[-1]["more_body"] is False
    if not fails:
        assert body == whole + sse.DONE
    elif chunks:
        assert body.startswith(whole)
        error, done, _ = body[len(whole) :].split(b"\n\n")
        assert (done + b"\n\n") == sse.DONE
        assert json.loads(error[6:])["error"]["code"] == 503
    else:
        assert sent[0]["status"] == 503
        assert json.loads(body)["error"]
