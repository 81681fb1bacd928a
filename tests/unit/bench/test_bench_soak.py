"""The soak benchmark knows right answers, and its rules see what is wrong."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from bench.soak.chaos import Attack, Killer
from bench.soak.faults import INJECTIONS, Dice
from bench.soak.leftovers import Look
from bench.soak.memory import Sample, Trend, trend
from bench.soak.processes import Service
from bench.soak.referee import Referee
from bench.soak.scrape import Metrics
from bench.soak.speakers import Heard, Trouble
from bench.soak.stack import BLOCK_SIZE, MODEL, Shape, Stack, lay_out
from bench.soak.talks import ChatTalk, TokenTalk, matches
from bench.soak.tally import Tally
from bench.soak.verdicts import on_answers, on_kills, on_memory, on_rest
from kvloop.stack.ports import PortPool
from services.sim.faults import parse
from tests.flow.sim.engines import CHAT, engine, prompt

REFEREE = Referee(MODEL, BLOCK_SIZE)


@pytest.mark.parametrize("length", [1, BLOCK_SIZE, 5 * BLOCK_SIZE + 3])
async def test_the_referee_says_what_an_engine_says(length: int) -> None:
    async with engine(role="both", block_size=BLOCK_SIZE) as alone:
        tokens = prompt(length)
        reply = await alone.complete(tokens, max_tokens=2 * BLOCK_SIZE)
        assert reply.choice["token_ids"] == REFEREE.tokens(tokens, 2 * BLOCK_SIZE)


async def test_the_referee_says_what_an_engine_says_in_a_chat() -> None:
    talk = ChatTalk("a chat", random.Random(1))
    async with engine(role="both", block_size=BLOCK_SIZE) as alone:
        for _ in range(3):
            talk.ask(40)
            body = {"model": MODEL, "messages": talk.messages, "max_tokens": 20}
            reply = await alone.post(CHAT, body | {"ignore_eos": True})
            right = talk.right(REFEREE, 20)
            assert reply.choice["message"]["content"] == right
            talk.answered(right)


def test_a_changed_history_has_another_answer() -> None:
    talk = TokenTalk("t", random.Random(1))
    talk.ask(100)
    right = talk.right(REFEREE, 8)
    talk.tokens[3] += 1
    assert talk.right(REFEREE, 8) != right


def test_an_answer_that_broke_off_is_right_as_far_as_it_came() -> None:
    assert matches([1, 2], [1, 2, 3], whole=False)
    assert not matches([1, 2], [1, 2, 3], whole=True)
    assert not matches([1, 4], [1, 2, 3], whole=False)
    assert matches("a wo", "a word", whole=False)


@pytest.mark.parametrize("injection", INJECTIONS, ids=lambda each: each.name)
def test_every_injection_is_one_that_engines_know(injection: Any) -> None:
    manner = injection.manner(24)
    faults = parse(manner.fault)
    assert len(faults) == bool(injection.fault)
    assert bool(faults) != (injection.leaves or injection.pauses)
    assert all(fault.after_tokens in (0, 12) for fault in faults)


def test_as_many_turns_meet_a_fault_as_are_asked_for() -> None:
    dice = Dice(0.1, random.Random(1))
    met = [injection for _ in range(10_000) if (injection := dice.draw())]
    assert 900 < len(met) < 1100
    assert {injection.name for injection in met} == {injection.name for injection in INJECTIONS}


def _tally(heard: Heard, excuse: str = "") -> Tally:
    tally = Tally(turns=5)
    tally.judge(heard, [1, 2, 3], 3, "t", excuse)
    return tally


@pytest.mark.parametrize(
    ("heard", "excuse", "holds"),
    [
        (Heard([1, 2, 3]), "", True),
        (Heard([1, 2, 4]), "", False),
        (Heard([1, 2]), "", False),
        (Heard([1, 2], left=True), "", True),
        (Heard([1, 2], Trouble("broke", True)), "it was killed", True),
        (Heard([1, 2], Trouble("broke", True)), "", False),
        (Heard([1, 9], Trouble("broke", True)), "it was killed", False),
    ],
)
def test_wrong_answers_and_errors_without_an_excuse_are_seen(
    heard: Heard, excuse: str, holds: bool
) -> None:
    assert all(verdict.holds for verdict in on_answers(_tally(heard, excuse))) is holds


def test_turns_that_hang_or_are_lost_are_seen() -> None:
    hung, lost = Tally(turns=1), Tally(turns=1)
    hung.hangs("t", 60)
    lost.gives_up("t")
    for tally in (hung, lost, Tally()):
        assert not all(verdict.holds for verdict in on_answers(tally))


@pytest.mark.parametrize(("mib_per_second", "holds"), [(0.0, True), (0.5, False)])
def test_memory_that_grows_is_seen(mib_per_second: float, holds: bool) -> None:
    samples = [Sample(second, 100 + second * mib_per_second, 1) for second in range(120)]
    found = trend(samples, 20, 110)
    assert found is not None
    assert found.mib_per_minute == pytest.approx(60 * mib_per_second)
    assert [verdict.holds for verdict in on_memory({"router": found})] == [holds]


def test_a_trend_needs_some_time() -> None:
    assert trend([Sample(second, 1, 1) for second in range(20)], 0, 19) is None
    assert [v.holds for v in on_memory({"r": Trend(100, 104, 104, 9.0)})] == [True]


@pytest.mark.parametrize(
    ("after", "ends"),
    [
        (Look(held={"decode-0: pins": 1}), {}),
        (Look(away=["kvmeta"]), {}),
        (Look(standing={"router: tasks": 99}), {}),
        (Look(), {"router": ["status 1"]}),
    ],
)
def test_what_is_left_is_seen(after: Look, ends: dict[str, list[str]]) -> None:
    before = Look(standing={"router: tasks": 15})
    assert all(verdict.holds for verdict in on_rest(before, before, {"router": []}))
    assert sum(not verdict.holds for verdict in on_rest(before, after, ends)) == 1
    assert not on_kills({}).holds


def test_metrics_are_read() -> None:
    metrics = Metrics(
        "# HELP a_total Things.\n# TYPE a_total counter\n"
        'a_total{reason="x"} 2.0\na_total{reason="y"} 0.0\na_created 1.7e+09\nb 3\n'
    )
    assert metrics.total("a_total") == 2
    assert metrics.by_label("a_total") == {"x": 2}
    assert metrics.total("b") == 3
    with pytest.raises(KeyError):
        metrics.total("c")


def test_stacks_that_start_together_share_no_port_and_have_none_that_the_kernel_gives_away(
    tmp_path: Path,
) -> None:
    with PortPool() as one, PortPool() as other:
        stacks = [lay_out(Shape(routers=2), tmp_path, tmp_path, pool) for pool in (one, other)]
    ports = [port for stack in stacks for port in _ports(stack)]
    assert len(ports) == 2 * 24
    assert len(set(ports)) == len(ports)
    assert max(ports) < 32_768


def _ports(stack: Stack) -> Iterator[int]:
    """All ports that a stack's processes are told to take."""
    for service in stack.services:
        for argument in service.command:
            name, _, value = argument.partition("=")
            if name.endswith(("listen", "port")):
                yield int(value.rpartition(":")[2])


class _Victim:
    """A process that serves again when the test says so."""

    def __init__(self, name: str) -> None:
        self.real = Service(name, "nothing", (), 1, Path("unused"))
        self.name, self.up = name, self.real.up
        self.up.set()
        self.signals: list[signal.Signals] = []

    def end(self, how: signal.Signals) -> None:
        self.signals.append(how)
        self.up.clear()


async def test_an_error_is_excused_from_the_kill_until_all_have_settled() -> None:
    now = 0.0
    router, kvmeta = _Victim("router"), _Victim("kvmeta")
    killer = Killer(
        Attack(0.01, settle_seconds=5.0),
        [cast(Service, router), cast(Service, kvmeta)],
        [cast(Service, router)],
        lambda: now,
        random.Random(1),
    )
    assert killer.excuse == ""
    for victim, excused in ((kvmeta, False), (router, True)):
        killing = killer.kill(cast(Service, victim))
        killing.send(None)  # as far as it comes while the process is down
        assert killer.excuse == ("router down" if excused else "")
        victim.up.set()
        with pytest.raises(StopIteration):
            killing.send(None)
        assert killer.excuse == ("just after" if excused else "")
    now = 5.1
    assert killer.excuse == ""
    assert sum(killer.kills.values()) == 2
