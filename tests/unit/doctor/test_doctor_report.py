"""The report, and the probe's conversations."""

from __future__ import annotations

import json
import random

import pytest

from kvloop.completions import Completion
from kvloop.doctor.examine import examine
from kvloop.doctor.facts import Probe, ProbeRound, Service
from kvloop.doctor.findings import Severity, advice, wrong
from kvloop.doctor.probe import ProbePlan, probe
from kvloop.doctor.report import as_json, as_text
from kvloop.errors import UnavailableError
from tests.unit.doctor.cases import completion, decode, link, prefill, receipt, stack


def test_a_healthy_stack_is_told_in_a_few_lines() -> None:
    text = as_text(stack(), [])
    assert "router router:7100, kvmeta kvmeta:7200: 2 workers, models qwen" in text
    assert "prefill-0 <- decode-0: pulls 800,000 tokens/s (200 GB/s)" in text
    assert "computes 10,000 tokens/s" in text
    assert text.endswith("all well\n")


def test_findings_are_told_with_what_to_change() -> None:
    text = as_text(stack(), [wrong("a", "x", "is broken", "mend it"), advice("b", "y", "is odd")])
    assert "WRONG   x: is broken\n        -> mend it" in text
    assert "advice  y: is odd" in text
    assert "1 wrong, 1 to consider" in text


def test_what_is_wrong_comes_first() -> None:
    facts = stack(
        prefill(link(0.3, held_back=True)), decode(lease_renewal=False), clock_offset_seconds=99.0
    )
    severities = [finding.severity for finding in examine(facts)]
    assert severities == sorted(severities, reverse=True)
    assert severities[0] is Severity.WRONG


def test_the_probe_is_told_round_by_round() -> None:
    rounds = (
        ProbeRound(receipt(), receipt(pulled_tokens=512, pull_seconds=0.0125)),
        ProbeRound(receipt(), receipt(pulled_tokens=0, pull_seconds=None, miss_reason="CACHED")),
    )
    alone = receipt(pulled_tokens=0, prefill_leg_seconds=0.4)
    text = as_text(stack(probe=Probe(rounds, alone)), [])
    assert "1. pulled 512 of 4,500 tokens in 12.5 ms" in text
    assert "2. pulled 0 of 4,500 tokens (cached)" in text
    assert "without reuse: 4,500 tokens computed in 400 ms" in text


def test_json_has_the_same_and_a_verdict() -> None:
    facts = stack(
        router=Service("r:1", "refused"),
        probe=Probe((ProbeRound(receipt(), receipt()),), receipt()),
    )
    report = json.loads(as_json(facts, examine(facts)))
    assert report["healthy"] is False
    assert report["findings"][0]["check"] == "service_unreachable"
    assert report["links"][0]["bytes_per_second"] == 200e9
    assert report["probe"]["recompute"]["prompt_tokens"] == 4500
    assert json.loads(as_json(stack(), []))["healthy"] is True


class ScriptedTalker:
    """Answers with fixed tokens and keeps what it was asked."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.turns: list[tuple[list[int], str, int, bool]] = []
        self.ended: list[str] = []
        self._fail_at = fail_at

    def turn(
        self, prompt: list[int], conversation: str, *, answer_tokens: int, reuse: bool
    ) -> Completion:
        self.turns.append((prompt, conversation, answer_tokens, reuse))
        if len(self.turns) == self._fail_at:
            raise UnavailableError("gone")
        return completion(token_ids=(7, 8, 9))

    def end(self, conversation: str) -> None:
        self.ended.append(conversation)


PLAN = ProbePlan("qwen", prompt_tokens=100, answer_tokens=3, rounds=2)


def test_each_round_goes_on_with_the_tokens_of_its_first_turn_and_is_ended() -> None:
    talker = ScriptedTalker()
    found = probe(talker, PLAN, random.Random(1))
    assert len(found.rounds) == 2
    (first, name, answer, reuse), (second, same_name, _, _) = talker.turns[:2]
    assert (len(first), answer, reuse, same_name) == (100, 3, True, name)
    assert second[:103] == [*first, 7, 8, 9]
    assert len(second) > 103
    assert talker.ended == [name, talker.turns[2][1]]
    assert name != talker.turns[2][1]


def test_the_comparison_is_as_long_and_reuses_nothing() -> None:
    talker = ScriptedTalker()
    probe(talker, PLAN, random.Random(1))
    prompt, _, _, reuse = talker.turns[-1]
    assert len(prompt) == len(talker.turns[1][0])
    assert not reuse


def test_a_round_that_fails_still_ends_its_conversation() -> None:
    talker = ScriptedTalker(fail_at=2)
    with pytest.raises(UnavailableError):
        probe(talker, PLAN, random.Random(1))
    assert talker.ended == [talker.turns[0][1]]
