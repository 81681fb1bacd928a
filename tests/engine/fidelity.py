"""Every feature, streamed and not, directly from an engine and through kvloop."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
DOCUMENT = Path(__file__).parents[2] / "docs" / "fidelity.md"

_HI = [{"role": "user", "content": "Say something about the sea and the wind."}]
_LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"far": {"type": "boolean"}},
            "required": ["far"],
        },
    },
}
_SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "answer", "schema": _LOOK["function"]["parameters"]},  # type: ignore[index]
}


@dataclass(frozen=True)
class Feature:
    """One thing that clients use."""

    name: str
    path: str
    members: Mapping[str, Any]
    through: str = ""
    """Why it is not the same through kvloop; empty if it has to be."""
    through_stream: str = ""
    """The same, of streams alone."""


FEATURES = [
    Feature("chat", CHAT, {"messages": _HI}),
    Feature(
        "system and assistant messages, content in parts",
        CHAT,
        {
            "messages": [
                {"role": "system", "content": "You are brief."},
                {"role": "user", "content": [{"type": "text", "text": "hello"}]},
                {"role": "assistant", "content": "hi"},
                *_HI,
            ]
        },
    ),
    Feature(
        "content: null beside tool calls",
        CHAT,
        {
            "messages": [
                *_HI,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "a",
                            "type": "function",
                            "function": {"name": "look", "arguments": "{}"},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "a", "content": "waves"},
            ]
        },
    ),
    Feature(
        "tools, tool_choice: none", CHAT, {"messages": _HI, "tools": [_LOOK], "tool_choice": "none"}
    ),
    Feature("tools, tool_choice: auto", CHAT, {"messages": _HI, "tools": [_LOOK]}),
    Feature(
        "tools, one function named",
        CHAT,
        {
            "messages": _HI,
            "tools": [_LOOK],
            "tool_choice": {"type": "function", "function": {"name": "look"}},
        },
    ),
    Feature(
        "tools, tool_choice: required",
        CHAT,
        {"messages": _HI, "tools": [_LOOK], "tool_choice": "required"},
    ),
    Feature("response_format: json_schema", CHAT, {"messages": _HI, "response_format": _SCHEMA}),
    Feature(
        "logprobs with top_logprobs", CHAT, {"messages": _HI, "logprobs": True, "top_logprobs": 2}
    ),
    Feature("n: 3", CHAT, {"messages": _HI, "n": 3, "temperature": 0.7, "seed": 7}),
    Feature("stop strings", CHAT, {"messages": _HI, "stop": ["a", "e"]}),
    Feature("max_completion_tokens: 1", CHAT, {"messages": _HI, "max_completion_tokens": 1}),
    Feature("min_tokens", CHAT, {"messages": _HI, "min_tokens": 12, "max_tokens": 12}),
    Feature("seeded sampling", CHAT, {"messages": _HI, "temperature": 0.9, "seed": 11}),
    Feature(
        "penalties and logit_bias",
        CHAT,
        {
            "messages": _HI,
            "presence_penalty": 1.5,
            "frequency_penalty": 0.5,
            "logit_bias": {"300": 5},
        },
    ),
    Feature("return_token_ids", CHAT, {"messages": _HI, "return_token_ids": True}),
    Feature("prompt_logprobs (chat)", CHAT, {"messages": _HI, "prompt_logprobs": 1}),
    Feature("unknown members", CHAT, {"messages": _HI, "x_vendor": {"a": [1.5, None]}}),
    Feature("completion of text", COMPLETIONS, {"prompt": "the sea and"}),
    Feature("completion of token ids", COMPLETIONS, {"prompt": [300, 301, 302, 303]}),
    Feature("several prompts", COMPLETIONS, {"prompt": ["the sea", "the wind"]}),
    Feature("completion logprobs", COMPLETIONS, {"prompt": "the sea", "logprobs": 2}),
    Feature("echo with logprobs", COMPLETIONS, {"prompt": "the sea", "echo": True, "logprobs": 1}),
    Feature(
        "prompt_logprobs (completion)", COMPLETIONS, {"prompt": "the sea", "prompt_logprobs": 1}
    ),
    Feature(
        "error: model not served",
        CHAT,
        {"messages": _HI, "model": "other"},
        "status and type are the same, the message is kvloop's",
    ),
    Feature("error: content of a wrong type", CHAT, {"messages": [{"role": "user", "content": 7}]}),
    Feature(
        "error: no messages",
        CHAT,
        {"messages": []},
        "refused by kvloop, before any engine is asked",
    ),
    Feature(
        "error: negative temperature",
        CHAT,
        {"messages": _HI, "temperature": -1},
        "status is the same, the message is kvloop's",
    ),
    Feature(
        "error: unknown token id",
        COMPLETIONS,
        {"prompt": [10**6]},
        through_stream="the same error as an HTTP status, where vLLM sends 200 and an error event",
    ),
]


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
            body = {"model": model, "max_tokens": 12, "temperature": 0, **feature.members}
            if stream:
                body |= {"stream": True, "stream_options": {"include_usage": True}}
            replies = [
                await _ask(session, url + feature.path, body, stream=stream)
                for url in (direct, through)
            ]
            rows.append(Row(feature, stream, *replies))
    return rows


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
which differ between any two requests; `kv_transfer_params` and `ec_transfer_params`,
which kvloop removes, null or not; and `usage.prompt_tokens_details`, which kvloop sets
(see [gateway.md](gateway.md)). Log probabilities have to agree to 1e-3. Streams are put
together before they are compared, since the number of tokens in an event depends on how
busy the engine is; that events pass unchanged is shown byte by byte in
`tests/flow/gateway/test_gateway_streams.py`.

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
    *events, done, rest = raw.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b""), raw[-200:]
    values = [_comparable(json.loads(event.removeprefix(b"data: "))) for event in events]
    return Reply(reply.status, _folded(values))


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


def _joined(first: Any, second: Any) -> Any:
    """Two values of one member, one after the other."""
    if first is None or second is None:
        return second if first is None else first
    if isinstance(first, dict) and isinstance(second, dict):
        return {
            name: _joined(first.get(name), second.get(name)) for name in sorted({*first, *second})
        }
    if isinstance(first, list) and isinstance(second, list):
        return first + second
    if isinstance(first, str) and first != second:
        return first + second
    return second


_IGNORED = {
    "id",
    "created",
    "kv_transfer_params",
    "ec_transfer_params",
    "prompt_tokens_details",
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
