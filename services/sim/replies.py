"""Replies and stream chunks of the two endpoints, member by member as vLLM's."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from services.sim.api_requests import ChatRequest, CompletionRequest
from services.sim.choices import Choice, Delta
from services.sim.logprobs import chat_logprobs, completion_logprobs
from services.sim.tools import ToolCallReader, call_id

Json = dict[str, Any]

_CHAT, _CHAT_CHUNK, _COMPLETION = "chat.completion", "chat.completion.chunk", "text_completion"


@dataclass(frozen=True)
class Frame:
    """What all replies and chunks have in common, of both endpoints."""

    id: str
    created: int
    model: str
    fingerprint: str

    def chunk(self, kind: str, choices: list[Json]) -> Json:
        """The members that every chunk and every reply begins with."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def usage_chunk(self, kind: str, usage: Usage) -> Json:
        """The chunk at the end that carries usage."""
        return self.chunk(kind, []) | {
            "usage": usage.to_json(nulls=False),
            "system_fingerprint": self.fingerprint,
        }

    def whole(self, kind: str, choices: list[Json], usage: Usage) -> Json:
        """The members that every reply in one piece begins with."""
        return self.chunk(kind, choices) | {
            "service_tier": None,
            "system_fingerprint": self.fingerprint,
            "usage": usage.to_json(nulls=True),
        }


@dataclass(frozen=True)
class Usage:
    """Token counts of one reply."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    """None: not told."""

    def to_json(self, *, nulls: bool) -> Json:
        """OpenAI's usage object.

        Args:
            nulls: whether details that are not told appear as null.
        """
        usage: Json = {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
        }
        if self.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        elif nulls:
            usage["prompt_tokens_details"] = None
        if nulls:
            usage["completion_tokens_details"] = None
        return usage


class Replies(Protocol):
    """Writes the replies of one request."""

    def opening(self) -> list[Json]:
        """Chunks that come before the first token."""

    def chunk(self, index: int, delta: Delta) -> Json:
        """The chunk of one choice's new tokens."""

    def usage_chunk(self, usage: Usage) -> Json:
        """The chunk at the end that carries usage."""

    def whole(
        self, choices: Sequence[Choice], usage: Usage, params: Mapping[str, Any] | None
    ) -> Json:
        """The reply in one piece."""


class ChatReplies:
    """Replies of /v1/chat/completions.

    Args:
        request: the request.
        frame: of the reply.
        prompt: token ids of the prompt.
        function: name of the function that the answer calls, if it must.
    """

    def __init__(
        self,
        request: ChatRequest,
        frame: Frame,
        prompt: Sequence[int],
        function: str | None,
    ) -> None:
        self._request = request
        self._frame = frame
        self._prompt = prompt
        self._function = function
        self._readers = [
            ToolCallReader(function) for _ in range(request.choices) if function is not None
        ]
        self._is_required = request.tool_choice == "required"

    def opening(self) -> list[Json]:
        """One chunk per choice that names the role."""
        shown = list(self._prompt) if self._request.return_token_ids else None
        return [
            self._frame.chunk(
                _CHAT_CHUNK,
                [
                    {
                        "index": index,
                        "delta": {"role": "assistant", "content": ""},
                        "logprobs": None,
                        "finish_reason": None,
                    }
                ],
            )
            | {"prompt_token_ids": shown, "prompt_text": None}
            for index in range(self._request.choices)
        ]

    def chunk(self, index: int, delta: Delta) -> Json:
        """A content delta, or a piece of a tool call."""
        choice: Json = {
            "index": index,
            "delta": self._delta(index, delta),
            "logprobs": self._logprobs(delta.tokens, delta.digests),
            "finish_reason": self._finish_reason(delta.finish_reason),
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        choice["token_ids"] = delta.tokens if self._request.return_token_ids else None
        chunk = self._frame.chunk(_CHAT_CHUNK, [choice])
        if delta.finish_reason is not None and not self._request.include_usage:
            chunk["system_fingerprint"] = self._frame.fingerprint
        return chunk

    def usage_chunk(self, usage: Usage) -> Json:
        """The chunk at the end that carries usage."""
        return self._frame.usage_chunk(_CHAT_CHUNK, usage)

    def whole(
        self, choices: Sequence[Choice], usage: Usage, params: Mapping[str, Any] | None
    ) -> Json:
        """The reply in one piece."""
        written = [self._whole_choice(index, choice) for index, choice in enumerate(choices)]
        return self._frame.whole(_CHAT, written, usage) | {
            "prompt_logprobs": None,
            "prompt_token_ids": list(self._prompt) if self._request.return_token_ids else None,
            "prompt_text": None,
            "kv_transfer_params": params,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def _delta(self, index: int, delta: Delta) -> Json:
        if self._function is None:
            return {"content": delta.text}
        piece = self._readers[index].add(delta.text, finished=delta.finish_reason is not None)
        if piece is None:
            return {}
        function = {"arguments": piece.arguments}
        if piece.name is None:
            return {"tool_calls": [{"index": 0, "function": function}]}
        call = {"id": call_id(), "type": "function", "index": 0}
        return {"tool_calls": [call | {"function": {"name": piece.name} | function}]}

    def _whole_choice(self, index: int, choice: Choice) -> Json:
        message: Json = {
            "role": "assistant",
            "content": choice.text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
        }
        if self._function is not None:
            piece = ToolCallReader(self._function).add(choice.text, finished=True)
            function = {"name": self._function, "arguments": piece.arguments if piece else ""}
            message["content"] = ""
            message["tool_calls"] = [{"id": call_id(), "type": "function", "function": function}]
        message["reasoning"] = None
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.tokens, choice.digests),
            "finish_reason": self._finish_reason(choice.finish_reason),
            "stop_reason": choice.stop_reason,
            "token_ids": choice.tokens if self._request.return_token_ids else None,
            "routed_experts": None,
        }

    def _finish_reason(self, reason: str | None) -> str | None:
        called = self._function is not None and self._is_required
        return "tool_calls" if called and reason == "stop" else reason

    def _logprobs(self, tokens: Sequence[int], digests: Sequence[bytes]) -> Json | None:
        if not self._request.logprobs:
            return None
        return chat_logprobs(tokens, digests, self._request.top_logprobs or 0)


class CompletionReplies:
    """Replies of /v1/completions.

    Args:
        request: the request.
        frame: of the reply.
        prompts: token ids of each prompt.
        echoes: text of each prompt, if the answer repeats it.
    """

    def __init__(
        self,
        request: CompletionRequest,
        frame: Frame,
        prompts: Sequence[Sequence[int]],
        echoes: Sequence[str],
    ) -> None:
        self._request = request
        self._frame = frame
        self._prompts = prompts
        self._echoes = echoes
        choices = len(prompts) * request.choices
        self._begun = [False] * choices
        self._offsets = [0] * choices

    def opening(self) -> list[Json]:
        """Nothing: the first chunk carries text."""
        return []

    def chunk(self, index: int, delta: Delta) -> Json:
        """A piece of text."""
        prompt_index = index // self._request.choices
        text = delta.text
        prompt_ids = None
        if not self._begun[index]:
            self._begun[index] = True
            if self._request.return_token_ids:
                prompt_ids = list(self._prompts[prompt_index])
            if self._echoes:
                text = self._echoes[prompt_index] + text
        logprobs = None
        if self._request.logprobs is not None:
            logprobs = completion_logprobs(
                delta.tokens, delta.digests, self._request.logprobs, offset=self._offsets[index]
            )
        self._offsets[index] += len(text)
        chunk = self._frame.chunk(
            _COMPLETION,
            [
                {
                    "index": index,
                    "text": text,
                    "logprobs": logprobs,
                    "finish_reason": delta.finish_reason,
                    "stop_reason": delta.stop_reason,
                    "prompt_token_ids": prompt_ids,
                    "token_ids": delta.tokens if self._request.return_token_ids else None,
                }
            ],
        )
        if delta.finish_reason is not None and not self._request.include_usage:
            chunk["system_fingerprint"] = self._frame.fingerprint
        return chunk

    def usage_chunk(self, usage: Usage) -> Json:
        """The chunk at the end that carries usage."""
        return self._frame.usage_chunk(_COMPLETION, usage)

    def whole(
        self, choices: Sequence[Choice], usage: Usage, params: Mapping[str, Any] | None
    ) -> Json:
        """The reply in one piece."""
        written = [self._whole_choice(index, choice) for index, choice in enumerate(choices)]
        return self._frame.whole(_COMPLETION, written, usage) | {
            "kv_transfer_params": params,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def _whole_choice(self, index: int, choice: Choice) -> Json:
        prompt_index = index // self._request.choices
        echo = self._echoes[prompt_index] if self._echoes else ""
        with_ids = self._request.return_token_ids
        logprobs = None
        if self._request.logprobs is not None:
            logprobs = completion_logprobs(
                choice.tokens, choice.digests, self._request.logprobs, offset=len(echo)
            )
        return {
            "index": index,
            "text": echo + choice.text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": choice.tokens if with_ids else None,
            "prompt_logprobs": None,
            "prompt_token_ids": list(self._prompts[prompt_index]) if with_ids else None,
            "routed_experts": None,
        }


def new_reply_id(prefix: str, wanted: str | None) -> str:
    """The id of a reply: the caller's name for the request, or a random one."""
    return f"{prefix}-{wanted or secrets.token_hex(16)}"
