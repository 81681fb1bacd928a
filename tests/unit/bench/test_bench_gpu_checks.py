"""When the GPU bench says that retained KV was renewed, and when that it was not."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field

import pytest
from google.protobuf.duration_pb2 import Duration

from bench.gpu import checks
from bench.gpu.checks import Check, RenewalCheck
from kvloop.bench.turns import TurnRequest, TurnResult
from kvloop.kvmeta.v1 import ledger_pb2
from tests.unit.bench.fakes import FakeClock, FakeTurns

LEASE = 20.0


def _pin(age: int, remaining: int) -> ledger_pb2.Pin:
    return ledger_pb2.Pin(
        age=Duration(seconds=age),
        engine_remaining=Duration(seconds=remaining),
    )


@dataclass
class _Turns(FakeTurns):
    """Turns that pull what decode holds, as far as it still does."""

    pulls: bool = True

    async def run(self, request: TurnRequest) -> TurnResult:
        """As much as a whole history."""
        taken = await super().run(request)
        pulled = len(request.prompt) - 200 if request.reuse and self.pulls else 0
        return dataclasses.replace(taken, pulled_tokens=pulled)


@dataclass
class _Stack:
    """What the check looks at.

    Attributes:
        pins: what the ledger tells.
        turns: what it runs.
    """

    pins: list[ledger_pb2.Pin] = field(default_factory=lambda: [_pin(50, 12)])
    turns: _Turns = field(default_factory=_Turns)

    async def check(self, monkeypatch: pytest.MonkeyPatch) -> Check:
        """Both its halves, the second when the lease is over twice."""
        clock = self.turns.clock
        asked: list[str] = []

        def list_pins(kvmeta: str) -> list[ledger_pb2.Pin]:
            asked.append(kvmeta)
            return self.pins

        monkeypatch.setattr(checks, "list_pins", list_pins)
        check = RenewalCheck(self.turns, "kvmeta:1", LEASE, random.Random(1), "renewal", clock)
        await check.begin()
        clock.now += 50
        done = await check.finish()
        assert asked == ["kvmeta:1"]
        return done


async def test_blocks_that_outlive_their_lease_and_are_pulled_were_renewed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stack = _Stack(pins=[_pin(3, 19), _pin(50, 12)])
    done = await stack.check(monkeypatch)
    assert done.passed, done
    assert "lease of 20 s, 50 s old, kept for 12 s more" in done.detail
    assert "1564 of 1764 tokens pulled" in done.detail
    opening, pulled, fresh = stack.turns.requests
    assert opening.conversation == pulled.conversation != fresh.conversation
    assert (opening.reuse, opening.last, pulled.reuse, fresh.reuse) == (True, False, True, False)
    assert list(pulled.prompt[:1500]) == list(opening.prompt)
    assert list(pulled.prompt) == list(fresh.prompt)
    assert stack.turns.ended == ["renewal"]


@pytest.mark.parametrize(
    ("pins", "why"),
    [
        ([], "nothing is retained"),
        ([_pin(3, 19)], "only blocks of other turns, which are younger than the lease"),
        ([_pin(50, 0)], "the engine's deadline has passed"),
        ([_pin(50, 430)], "kept for longer than a lease: nobody had to renew it"),
    ],
)
async def test_it_fails_where_nothing_was_renewed(
    monkeypatch: pytest.MonkeyPatch, pins: list[ledger_pb2.Pin], why: str
) -> None:
    assert not (await _Stack(pins=pins).check(monkeypatch)).passed, why


async def test_it_fails_where_nothing_is_pulled(monkeypatch: pytest.MonkeyPatch) -> None:
    done = await _Stack(turns=_Turns(pulls=False)).check(monkeypatch)
    assert not done.passed
    assert "0 of 1764 tokens pulled" in done.detail


async def test_it_fails_where_answers_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    done = await _Stack(turns=_Turns(wrong_when_reusing=True)).check(monkeypatch)
    assert not done.passed
    assert "DIFFERS" in done.detail


async def test_the_second_turn_waits_until_the_lease_is_long_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = FakeClock()
    turns = _Turns(clock=clock)
    monkeypatch.setattr(checks, "list_pins", lambda kvmeta: [_pin(45, 12)])
    monkeypatch.setattr("bench.gpu.checks.asyncio.sleep", clock.sleep)
    check = RenewalCheck(turns, "kvmeta:1", LEASE, random.Random(1), "renewal", clock)
    await check.begin()
    clock.now += 5  # other turns
    assert (await check.finish()).passed
    (slept,) = clock.slept
    assert slept == pytest.approx(2.25 * LEASE - 5)
