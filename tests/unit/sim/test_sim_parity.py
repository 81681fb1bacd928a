"""The simulated engine against the real thing, case by case.

Connector decisions are compared with kvloop's connector inside the installed
vLLM; replies are parsed and written again by vLLM's own models; metrics are looked
up in vLLM's sources.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.sim import metrics
from services.sim.api_requests import ChatRequest, CompletionRequest
from services.sim.choices import Delta
from services.sim.connector import KvloopConnector
from services.sim.kv import KvReader, start_digest
from services.sim.replies import ChatReplies, CompletionReplies, Frame, Usage
from services.sim.sequence import Ending, OutputChannel, Sampling
from services.sim.sequence import Sequence as EngineSequence
from services.sim.spec import Identity
from tests.unit.sim.lab import BLOCK, FIRST_PREFILL, SPEC, TTL, Lab

_VLLM = importlib.util.find_spec("vllm")
pytestmark = pytest.mark.skipif(_VLLM is None, reason="vLLM is not installed")

_ROOT = Path(__file__).parents[3]
_SCRIPT = Path(__file__).with_name("vllm_parity.py")
_ENGINE = {
    "engine_id": "engine-x",
    "host": "10.0.0.7",
    "port": 5699,
    "block_size": BLOCK,
    "threshold": 64,
    "ttl": TTL,
}
_SPEC = replace(SPEC, side_channel_host="10.0.0.7", side_channel_port=5699, has_sidecar=False)
_PROMPT = list(range(1000, 1200))
_ANSWER = list(range(2000, 2040))


def _case(tokens: list[int], params: dict[str, Any] | None, **members: Any) -> dict[str, Any]:
    return {
        "request_id": "request-1",
        "tokens": tokens,
        "prompt_tokens": len(tokens),
        "params": params,
        "salt": None,
        "ending": "length",
        "blocks": list(range(10, 10 - -len(tokens) // BLOCK)),
        "scheduled": True,
        "computed": 0,
    } | members


def _finished_cases() -> dict[str, dict[str, Any]]:
    whole = [*_PROMPT, *_ANSWER]
    pulled = {"do_remote_prefill": True, "do_remote_decode": False}
    own = {"do_remote_prefill": False, "do_remote_decode": False}
    turn = {"kvloop_turn_id": "turn-1"}

    def decode(params: dict[str, Any] | None, **members: Any) -> dict[str, Any]:
        return _case(whole, params, prompt_tokens=len(_PROMPT), **members)

    return {
        "decode that pulled": decode(pulled | turn),
        "decode that computed its prompt": decode(own | turn),
        "decode outside of kvloop": decode(pulled),
        "decode that nobody wants to keep": decode(own | turn | {"kvloop_retain": False}),
        "decode ended by stop": decode(pulled | turn, ending="stop"),
        "decode aborted": decode(pulled | turn, ending="abort"),
        "decode failed": decode(pulled | turn, ending="error"),
        "decode with a salt": decode(pulled | turn, salt="tenant-a"),
        "plain request": decode(None),
        "prefill": _case([*_PROMPT, 7], FIRST_PREFILL | turn, prompt_tokens=len(_PROMPT)),
    }


def _prefill_cases() -> dict[str, dict[str, Any]]:
    handle = _sim_finish(_finished_cases()["decode that pulled"])[1]
    salted = _sim_finish(_finished_cases()["decode with a salt"])[1]
    history = [*_PROMPT, *_ANSWER]
    no_proof = {name: value for name, value in handle.items() if name != "kvloop_proof"}
    cases: dict[str, tuple[list[int], dict[str, Any], dict[str, Any]]] = {
        "extends": ([*history, 5, 6], handle, {}),
        "extends, part cached": ([*history, 5, 6], handle, {"computed": 4 * BLOCK}),
        "shorter": (history[:150], handle, {}),
        "middle edited": ([*history[:100], 3, *history[101:]], handle, {}),
        "start edited": ([3, *history[1:]], handle, {}),
        "all cached": ([*history, 5], handle, {"computed": 15 * BLOCK}),
        "little left": ([*history, 5], handle, {"computed": 13 * BLOCK}),
        "no proof": (history, no_proof, {}),
        "broken proof": (history, handle | {"kvloop_proof": {"version": 99}}, {}),
        "salt of its own": ([*history, 5], salted, {"salt": "tenant-a"}),
        "another salt": ([*history, 5], salted, {"salt": "tenant-b"}),
        "no remote blocks": (history, handle | {"remote_block_ids": None}, {}),
        "a field is missing": (
            history,
            {name: value for name, value in handle.items() if name != "remote_host"},
            {},
        ),
        "no handle": (history, FIRST_PREFILL, {}),
    }
    return {
        name: _case(tokens, json.loads(json.dumps(params)), **members)
        for name, (tokens, params, members) in cases.items()
    }


def _replies() -> Iterator[tuple[str, dict[str, Any]]]:
    """Replies of every shape, each with the name of vLLM's model of it."""
    frame = Frame("id-1", 1_700_000_000, "sim-model", "vllm-0.32.0-abc")
    usage = Usage(10, 2, cached_tokens=4)
    digest = bytes(range(16))
    middle = Delta(" the", [300], [digest])
    end = Delta(" end", [301], [digest], "stop", 301)
    tools = [{"type": "function", "function": {"name": "f"}}]
    for members in (
        {},
        {"logprobs": True, "top_logprobs": 2, "return_token_ids": True},
        {"tools": tools, "tool_choice": "required"},
    ):
        request = ChatRequest(messages=[], **members)
        function = "f" if "tools" in members else None
        chat = ChatReplies(request, frame, [1, 2], function)
        yield "chat.completion.chunk", chat.opening()[0]
        yield "chat.completion.chunk", chat.chunk(0, middle)
        yield "chat.completion.chunk", chat.chunk(0, end)
        yield "chat.completion.chunk", chat.usage_chunk(usage)
        yield "chat.completion", chat.whole([], usage, {"remote_port": 1})
    for logprobs in (None, 2):
        completion = CompletionReplies(
            CompletionRequest(prompt="hi", logprobs=logprobs, return_token_ids=True),
            frame,
            [[1, 2]],
            [],
        )
        yield "text_completion.chunk", completion.chunk(0, middle)
        yield "text_completion.chunk", completion.chunk(0, end)
        yield "text_completion.chunk", completion.usage_chunk(usage)
        yield "text_completion", completion.whole([], usage, None)


@pytest.fixture(scope="module")
def real() -> dict[str, Any]:
    """What the real ones answer to all cases."""
    cases = {
        "engine": _ENGINE,
        "finished": list(_finished_cases().values()),
        "prefills": list(_prefill_cases().values()),
        "replies": list(_replies()),
    }
    environment = {k: v for k, v in os.environ.items() if k != "KVLOOP_EVENTS_SOCKET"}
    done = subprocess.run(
        [sys.executable, str(_SCRIPT)],
        input=json.dumps(cases),
        env=environment | {"PYTHONPATH": str(_ROOT), "VLLM_NO_USAGE_STATS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return results


def _sequence(case: dict[str, Any]) -> EngineSequence:
    return EngineSequence(
        request_id=case["request_id"],
        choice=0,
        tokens=case["tokens"],
        prompt_tokens=case["prompt_tokens"],
        sampling=Sampling(max_tokens=1),
        salt=case["salt"],
        params=json.loads(json.dumps(case["params"])),
        channel=OutputChannel(),
        kv=KvReader({}, BLOCK, start_digest("m")),
        blocks=case["blocks"],
        computed=len(case["tokens"]) - 1,
    )


def _sim() -> KvloopConnector:
    return KvloopConnector(_SPEC, Identity("engine-x", "epoch", 0.0))


def _sim_finish(case: dict[str, Any]) -> tuple[bool, Any]:
    sequence = _sequence(case)
    connector = _sim()
    connector.allocated(sequence, 0, 0)
    outcome = connector.finished(sequence, Ending(case["ending"]), 100.0)
    return outcome.keep_until is not None, outcome.reply


def _without_clock(params: dict[str, Any] | None) -> dict[str, Any] | None:
    """Params, with the deadline replaced by whether there is one."""
    if params is None:
        return None
    shown = json.loads(json.dumps(params))
    shown["remote_blocks_expiry_time"] = shown["remote_blocks_expiry_time"] is not None
    return dict(shown)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", list(_finished_cases()))
def test_an_ended_request_leaves_the_same_behind(name: str, real: dict[str, Any]) -> None:
    index = list(_finished_cases()).index(name)
    kept, params = real["finished"][index]
    sim_kept, sim_params = _sim_finish(_finished_cases()[name])
    assert sim_kept == kept
    assert _without_clock(sim_params) == _without_clock(params)
    if params is not None:
        assert list(sim_params) == list(params)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", list(_prefill_cases()))
def test_a_prefill_pulls_and_reports_the_same(name: str, real: dict[str, Any]) -> None:
    case = _prefill_cases()[name]
    expected = real["prefills"][list(_prefill_cases()).index(name)]
    sequence = _sequence(case)
    connector = _sim()
    count = connector.matched_tokens(sequence, case["computed"])
    sequence.computed = case["computed"] + count
    load = connector.allocated(sequence, case["computed"] // BLOCK, count)
    assert sequence.params is not None
    assert count == expected["count"]
    assert (load is not None) == bool(expected["reads"])
    assert bool(load and load.local_blocks) == any(expected["reads"])
    assert {name: sequence.params.get(name) for name in expected["named"]} == expected["named"]
    outcome = connector.finished(sequence, Ending.LENGTH, 100.0)
    assert outcome.reply is not None
    assert outcome.reply["kvloop_report"] == expected["reply"]["kvloop_report"]


@pytest.mark.timeout(120)
def test_replies_are_what_vllms_own_models_would_write(real: dict[str, Any]) -> None:
    for (kind, reply), rewritten in zip(_replies(), real["replies"], strict=True):
        assert reply == rewritten, kind
        assert list(reply) == list(rewritten), kind


async def test_metrics_have_names_that_vllm_has(lab: Lab) -> None:
    assert _VLLM is not None
    assert _VLLM.submodule_search_locations
    root = Path(_VLLM.submodule_search_locations[0])
    connector = root / "distributed/kv_transfer/kv_connector/v1/nixl/stats.py"
    sources = (root / "v1/metrics/loggers.py").read_text() + connector.read_text()
    known = set(re.findall(r'name="(vllm:\w+)"', sources))
    ours = {family.name for family in metrics.EngineCollector(lab.engine()).collect()}
    assert ours <= known
    assert "vllm:nixl_bytes_transferred" in ours
