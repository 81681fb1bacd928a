"""From a request's body to the sequences that the engine runs for it."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.sim import chat_template
from services.sim.api_errors import ApiError, invalid_value, model_not_found
from services.sim.api_requests import (
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    check,
    check_prompt,
    token_limit,
)
from services.sim.choices import Choice, StopStrings
from services.sim.core import EngineCore
from services.sim.faults import HEADER, XARG, Fault, FaultBook, Leg, parse
from services.sim.replies import (
    ChatReplies,
    CompletionReplies,
    Frame,
    Replies,
    Usage,
    new_reply_id,
)
from services.sim.sequence import OutputChannel, Sampling
from services.sim.sequence import Sequence as EngineSequence
from services.sim.tokenizer import VOCAB_SIZE, Detokenizer, Tokenizer
from services.sim.tools import demanded_function, tool_grammar


@dataclass
class Job:
    """One request on its way through the engine."""

    request: GenerateRequest
    replies: Replies
    channel: OutputChannel
    sequences: list[EngineSequence]
    choices: list[Choice]
    faults: list[Fault]
    tells_cached_tokens: bool
    sent_tokens: int = 0
    """Tokens that have come out of the engine."""
    params: dict[str, Any] | None = field(default=None)
    """Transfer params for the reply: those of the first choice."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        first_choices = self.sequences[:: self.request.choices]
        return sum(sequence.prompt_tokens for sequence in first_choices)

    @property
    def ended(self) -> bool:
        """True if all choices have ended."""
        return all(choice.finish_reason is not None for choice in self.choices)

    def usage(self) -> Usage:
        """Token counts so far."""
        cached = self.sequences[0].cached_tokens if self.tells_cached_tokens else None
        return Usage(self.prompt_tokens, sum(len(choice.tokens) for choice in self.choices), cached)


class JobMaker:
    """Reads requests as one engine does.

    Args:
        core: the engine.
        tokenizer: of its model.
        faults: that requests may meet.
        fingerprint: system_fingerprint of its replies.
    """

    def __init__(
        self, core: EngineCore, tokenizer: Tokenizer, faults: FaultBook, fingerprint: str
    ) -> None:
        self._core = core
        self._tokenizer = tokenizer
        self._faults = faults
        self._fingerprint = fingerprint

    def faults(self, request: GenerateRequest, headers: Mapping[str, str]) -> list[Fault]:
        """The faults that this request meets.

        Raises:
            ApiError: it asks for a fault that does not exist.
        """
        asked: list[Fault] = []
        xarg = (request.vllm_xargs or {}).get(XARG)
        try:
            for text in (headers.get(HEADER), xarg):
                asked += parse(text) if isinstance(text, str) else []
        except ValueError as error:
            raise ApiError(str(error), param=XARG) from error
        params = request.kv_transfer_params or {}
        leg = Leg.PREFILL if params.get("do_remote_decode") else Leg.DECODE
        return self._faults.draw(leg, asked)

    def chat(self, request: ChatRequest, faults: list[Fault], name: str | None, now: float) -> Job:
        """A job for a chat.

        Args:
            request: its body.
            faults: what goes wrong with it.
            name: the caller's name for the request, if it has one.
            now: wall-clock seconds.

        Raises:
            ApiError: vLLM would refuse it.
        """
        self._check(request)
        function = demanded_function(request)
        tokens = _forwarded_tokens(request)
        if tokens is None:
            text = chat_template.render(
                request.messages,
                request.tools if request.tool_choice != "none" else None,
                add_generation_prompt=request.add_generation_prompt
                and not request.continue_final_message,
                continue_final_message=request.continue_final_message,
            )
            tokens = self._tokenizer.encode(text)
        tokens = self._prompt(request, tokens)
        reply_id = new_reply_id("chatcmpl", name or request.request_id)
        frame = Frame(reply_id, int(now), self._model(request), self._fingerprint)
        called = str(function.get("name", "")) if function is not None else None
        replies = ChatReplies(request, frame, tokens, called)
        job = self._job(request, replies, [(reply_id, tokens)], faults)
        if function is not None:
            for sequence in job.sequences:
                sequence.grammar = tool_grammar(function, self._tokenizer)
        return job

    def completion(
        self, request: CompletionRequest, faults: list[Fault], name: str | None, now: float
    ) -> Job:
        """A job for a completion. Arguments and errors as for `chat`."""
        self._check(request)
        forwarded = _forwarded_tokens(request)
        prompts = [
            self._prompt(
                request,
                forwarded
                or (self._tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)),
            )
            for prompt in request.prompts()
        ]
        reply_id = new_reply_id("cmpl", name or request.request_id)
        frame = Frame(reply_id, int(now), self._model(request), self._fingerprint)
        echoes = [self._tokenizer.decode(tokens) for tokens in prompts] if request.echo else []
        replies = CompletionReplies(request, frame, prompts, echoes)
        named = [(f"{reply_id}-{index}", tokens) for index, tokens in enumerate(prompts)]
        return self._job(request, replies, named, faults)

    def _check(self, request: GenerateRequest) -> None:
        spec = self._core.spec
        check(request, spec.max_model_len)
        if request.model and request.model != spec.model:
            raise model_not_found(request.model, spec.model)

    def _model(self, request: GenerateRequest) -> str:
        return request.model or self._core.spec.model

    def _prompt(self, request: GenerateRequest, tokens: list[int]) -> list[int]:
        keep = request.truncate_prompt_tokens
        limit = self._core.spec.max_model_len
        if keep is not None and keep != 0:
            tokens = tokens[-(limit - 1 if keep < 0 else keep) :]
        check_prompt(tokens, limit, VOCAB_SIZE)
        if len(tokens) == limit:
            raise invalid_value("max_tokens must be at least 1, got 0.", "max_tokens", 0)
        return tokens

    def _job(
        self,
        request: GenerateRequest,
        replies: Replies,
        prompts: Sequence[tuple[str, list[int]]],
        faults: list[Fault],
    ) -> Job:
        channel = OutputChannel()
        sequences = []
        choices = []
        for prompt_index, (request_id, tokens) in enumerate(prompts):
            for choice in range(request.choices):
                index = prompt_index * request.choices + choice
                # Like vLLM: the caller cannot know the engine's own request id.
                own_id = f"{request_id}-{secrets.token_hex(4)}"
                sequences.append(
                    EngineSequence(
                        request_id=own_id if request.choices == 1 else f"{choice}_{own_id}",
                        choice=index,
                        tokens=list(tokens),
                        prompt_tokens=len(tokens),
                        sampling=self._sampling(request, len(tokens), choice),
                        salt=request.cache_salt,
                        params=_copy(request.kv_transfer_params),
                        channel=channel,
                        kv=self._core.reader(),
                        faults=faults,
                    )
                )
                choices.append(
                    Choice(
                        StopStrings(
                            request.stop_strings, include=request.include_stop_str_in_output
                        ),
                        Detokenizer(skip_special=request.skip_special_tokens),
                        request.min_tokens,
                        request.include_stop_str_in_output,
                    )
                )
        tells = self._core.spec.prompt_tokens_details
        return Job(request, replies, channel, sequences, choices, faults, tells)

    def _sampling(self, request: GenerateRequest, prompt_tokens: int, choice: int) -> Sampling:
        _, limit = token_limit(request)
        room = self._core.spec.max_model_len - prompt_tokens
        seed = request.seed if request.temperature != 0 else None
        return Sampling(
            max_tokens=int(min(room, math.inf if limit is None else limit)),
            min_tokens=request.min_tokens,
            ignore_eos=request.ignore_eos,
            stop_token_ids=frozenset(request.stop_token_ids or ()),
            variation=b"%r:%d" % (seed, choice) if choice or seed is not None else b"",
        )


def _forwarded_tokens(request: GenerateRequest) -> list[int] | None:
    """Prompt token ids that prefill's router has put into the transfer params."""
    tokens = (request.kv_transfer_params or {}).pop("prompt_token_ids", None)
    if tokens is None:
        return None
    if (
        not isinstance(tokens, list)
        or not tokens
        or any(type(token) is not int for token in tokens)
    ):
        raise invalid_value(
            "`kv_transfer_params['prompt_token_ids']` must be a non-empty list of non-negative "
            "integers.",
            "kv_transfer_params.prompt_token_ids",
        )
    return tokens


def _copy(params: dict[str, Any] | None) -> dict[str, Any] | None:
    return dict(params) if params is not None else None
