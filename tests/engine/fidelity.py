"""Every feature, streamed and not, directly from an engine and through kvloop."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tests.engine.features import FEATURES, RESPONSES, Feature

DOCUMENT = Path(__file__).parents[2] / "docs" / "fidelity.md"


@dataclass(frozen=True)
class Reply:
    """A reply, reduced to what can be compared."""

    status: int
    value: Any


@dataclass(frozen=True)
class Row:
    """One feature in one form."""

    feature: Feature
    stream: bool
    direct: Reply
    through: Reply

    @property
    def same(self) -> bool:
        """Whether both replies say the same."""
        return self.direct.status == self.through.status and _equal(
            self.direct.value, self.through.value
        )

    @property
    def used(self) -> bool:
        """Whether the engine's own reply shows what the feature is about."""
        return self.feature.shows in json.dumps(self.direct.value)

    @property
    def reason(self) -> str:
        """Why it may differ; empty if it must not."""
        return self.feature.through or (self.feature.through_stream if self.stream else "")

    @property
    def verdict(self) -> str:
        """The cell of the table."""
        status = "" if self.through.status == 200 else f" (HTTP {self.through.status})"
        return f"{'same' if self.same else self.reason or 'DIFFERENT'}{status}"


async def compare(
    session: aiohttp.ClientSession, direct: str, through: str, model: str
) -> list[Row]:
    """Ask everything both ways.

    Args:
        session: HTTP session to use.
        direct: base URL of an engine.
        through: base URL of the gateway.
        model: served model name.
    """
    rows = []
    for feature in FEATURES:
        for stream in (False, True):
            body = _body(model, feature, stream=stream)
            replies = [
                await _ask(session, url + feature.path, body, stream=stream)
                for url in (direct, through)
            ]
            rows.append(Row(feature, stream, *replies))
    return rows


def _body(model: str, feature: Feature, *, stream: bool) -> dict[str, Any]:
    responses = feature.path == RESPONSES
    limit = "max_output_tokens" if responses else "max_tokens"
    body: dict[str, Any] = {"model": model, limit: 12, "temperature": 0, **feature.members}
    if stream:
        body["stream"] = True
        if not responses:
            body["stream_options"] = {"include_usage": True}
    return body


def document(rows: Sequence[Row], version: str) -> str:
    """The page that docs/fidelity.md holds."""
    cells: dict[str, dict[bool, str]] = {}
    for row in rows:
        cells.setdefault(row.feature.name, {})[row.stream] = row.verdict
    table = "\n".join(
        f"| {name} | {verdicts[False]} | {verdicts[True]} |" for name, verdicts in cells.items()
    )
    return _PAGE.format(version=version, table=table)


_PAGE = """# Fidelity

What a client gets through kvloop, compared with the same request sent to the decode
engine directly. Made by `tests/engine/test_5_gateway.py` on real engines, vLLM {version};
`KVLOOP_WRITE_DOCS=1` writes this page again.

Compared are status and body. Left out are `id`, `created` and the ids of tool calls,
which differ between any two requests, as do those of the items of a response;
`kv_transfer_params` and `ec_transfer_params`, which kvloop removes, null or not; and
`usage.prompt_tokens_details`, or `input_tokens_details`, which kvloop sets (see
[gateway.md](gateway.md)). Log probabilities have to agree to 1e-3. Streams are put
together before they are compared, since the number of tokens in an event depends on how
busy the engine is; that events pass unchanged is shown byte by byte in
`tests/flow/gateway/test_gateway_streams.py` and `test_gateway_responses.py`.

| feature | whole | streamed |
|---|---|---|
{table}
"""


async def _ask(
    session: aiohttp.ClientSession, url: str, body: Mapping[str, Any], *, stream: bool
) -> Reply:
    async with session.post(url, json=body) as reply:
        raw = await reply.read()
        if not stream or reply.status != 200:
            return Reply(reply.status, _comparable(json.loads(raw)))
    if url.endswith(RESPONSES):
        return Reply(reply.status, _steps(raw))
    *events, done, rest = raw.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b""), raw[-200:]
    values = [_comparable(json.loads(event.removeprefix(b"data: "))) for event in events]
    return Reply(reply.status, _folded(values))


def _steps(raw: bytes) -> list[Any]:
    """The events of a response's stream, with deltas in a row put together."""
    *events, rest = raw.split(b"\n\n")
    assert rest == b"", raw[-200:]
    steps: list[Any] = []
    for event in events:
        name, _, data = event.partition(b"\n")
        value = _comparable(json.loads(data.removeprefix(b"data: ")))
        assert name == b"event: " + value["type"].encode(), event
        if steps and steps[-1]["type"] == value["type"] and "delta" in value:
            steps[-1] = _joined(steps[-1], value)
        else:
            steps.append(value)
    return steps


def _folded(events: list[Any]) -> Any:
    """A stream as what it says in all: each choice put together, and the rest once.

    How many tokens share an event depends on how busy the engine's API server
    is, so events cannot be compared one by one.
    """
    choices: dict[int, Any] = {}
    rest: Any = None
    for event in events:
        for choice in event.pop("choices", []):
            index = choice["index"]
            choices[index] = _joined(choices[index], choice) if index in choices else choice
        rest = event if rest is None else _joined(rest, event)
    return {"choices": [choices[index] for index in sorted(choices)], "rest": rest}


_PIECES = {"content", "reasoning", "reasoning_content", "text", "arguments", "delta"}
"""Members whose text comes in pieces."""


def _joined(first: Any, second: Any, name: str = "") -> Any:
    """Two values of one member, one after the other."""
    if first is None or second is None:
        return second if first is None else first
    if isinstance(first, dict) and isinstance(second, dict):
        return {
            member: _joined(first.get(member), second.get(member), member)
            for member in sorted({*first, *second})
        }
    if isinstance(first, list) and isinstance(second, list):
        if name != "tool_calls":
            return first + second
        calls = {call["index"]: call for call in first}
        for call in second:
            calls[call["index"]] = _joined(calls.get(call["index"]), call)
        return [calls[index] for index in sorted(calls)]
    if isinstance(first, str) and name in _PIECES:
        return first + second
    return second


_IGNORED = {
    "id",
    "created",
    "created_at",
    "item_id",
    "call_id",
    "sequence_number",
    "kv_transfer_params",
    "ec_transfer_params",
    "prompt_tokens_details",
    "input_tokens_details",
}


def _comparable(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _comparable(v) for k, v in value.items() if k not in _IGNORED}
    return [_comparable(entry) for entry in value] if isinstance(value, list) else value


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, dict) and isinstance(right, dict):
        return list(left) == list(right) and all(_equal(left[k], right[k]) for k in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_equal, left, right))
    if isinstance(left, float) and isinstance(right, float):
        return math.isclose(left, right, abs_tol=1e-3)
    return bool(left == right)
