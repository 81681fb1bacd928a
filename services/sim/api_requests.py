"""Request bodies, and what vLLM refuses in them.

Fields that do not change what the simulated model says are accepted and ignored.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from services.sim.api_errors import ApiError, invalid_body, invalid_combination, invalid_value

_INT64_MAX = 2**63 - 1
_MAX_SALT = 128
_MAX_CHOICES = 16_384
_AT = re.compile(r"^(?P<text>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>\w+)`")
_EXPECTED = re.compile(r"^Expected `(?P<type>\w+)")


class StreamOptions(msgspec.Struct):
    """OpenAI's stream_options."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class GenerateRequest(msgspec.Struct, kw_only=True):
    """Fields that both endpoints have."""

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = 1
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None
    request_id: str | None = None

    @property
    def stop_strings(self) -> list[str]:
        """Stop strings as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def choices(self) -> int:
        """Answers per prompt."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def usage_in_every_chunk(self) -> bool:
        """Whether each chunk carries usage."""
        return self.include_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )


class ChatRequest(GenerateRequest, kw_only=True):
    """Body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class CompletionRequest(GenerateRequest, kw_only=True):
    """Body of /v1/completions."""

    prompt: Any = None
    logprobs: int | None = None
    echo: bool | None = False

    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as text or as token ids.

        Raises:
            ApiError: the prompt is of no accepted type.
        """
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt, list) and prompt:
            if _all_tokens(prompt):
                return [prompt]
            if all(isinstance(item, str) or (item and _all_tokens(item)) for item in prompt):
                return prompt
        raise invalid_body("body.prompt", "list_type", "Input should be a valid list or string")


class TokenizeRequest(msgspec.Struct):
    """Body of /tokenize."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool | None = False


class DetokenizeRequest(msgspec.Struct):
    """Body of /detokenize."""

    tokens: list[int]
    model: str | None = None


Body = TypeVar("Body", bound=msgspec.Struct)


def parse(body: bytes, type: type[Body]) -> Body:
    """Read a body.

    Raises:
        ApiError: it is no JSON object of that form.
    """
    try:
        return msgspec.json.decode(body, type=type, strict=False)
    except msgspec.ValidationError as error:
        raise _form_error(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid_body("body", "json_invalid", "JSON decode error") from error


def _form_error(text: str) -> ApiError:
    match = _AT.match(text)
    message, path = (match["text"], match["path"] or "") if match else (text, "")
    location = ".".join(["body", *re.findall(r"\w+", path)])
    if missing := _MISSING.match(message):
        return invalid_body(f"{location}.{missing['name']}", "missing", "Field required")
    expected = _EXPECTED.match(message)
    kind = f"{expected['type']}_type" if expected else "value_error"
    return invalid_body(location, kind, message.replace("`", ""))


def check(request: GenerateRequest, max_model_len: int) -> None:
    """Refuse what vLLM refuses whatever the prompt is.

    Raises:
        ApiError: a value is out of range, or fields do not go together.
    """
    _check_combinations(request)
    if request.n is not None and not 1 <= request.n <= _MAX_CHOICES:
        raise ApiError(f"n must be at least 1, got {request.n}.")
    limit_name, limit = token_limit(request)
    if limit is not None:
        if limit < 1:
            message = f"max_tokens must be at least 1, got {limit}."
            raise invalid_value(message, "max_tokens", limit)
        if limit > max_model_len:
            raise invalid_value(
                f"{limit_name}={limit} cannot be greater than max_model_len={max_model_len}. "
                "Please request fewer output tokens.",
                limit_name,
                limit,
            )
    if request.temperature is not None and not 0 <= request.temperature <= 2:
        rule = "non-negative" if request.temperature < 0 else "in [0, 2]"
        message = f"temperature must be {rule}, got {request.temperature}."
        raise invalid_value(message, "temperature", request.temperature)
    if request.top_p is not None and not 0 < request.top_p <= 1:
        raise invalid_value(
            f"top_p must be in (0, 1], got {request.top_p}.", "top_p", request.top_p
        )
    if request.n is not None and request.n > 1 and request.temperature == 0:
        raise ApiError(f"n must be 1 when using greedy sampling, got {request.n}.")
    if request.min_tokens < 0:
        raise ApiError(f"min_tokens must be greater than or equal to 0, got {request.min_tokens}.")
    if limit is not None and request.min_tokens > limit:
        raise ApiError(
            f"min_tokens must be less than or equal to max_tokens={limit}, "
            f"got {request.min_tokens}."
        )
    if any(not text for text in request.stop_strings):
        raise ApiError("stop cannot contain an empty string.")


def token_limit(request: GenerateRequest) -> tuple[str, int | None]:
    """The field that limits the answer, and its value."""
    if isinstance(request, ChatRequest):
        if request.max_completion_tokens is not None:
            return "max_completion_tokens", request.max_completion_tokens
        return "max_tokens", request.max_tokens
    return "max_tokens", 16 if request.max_tokens is None else request.max_tokens


def check_prompt(tokens: list[int], max_model_len: int, vocab_size: int) -> None:
    """Refuse a prompt that the model cannot take.

    Raises:
        ApiError: it is too long, or holds ids that are no tokens.
    """
    if not tokens:
        raise ApiError("The decoder prompt cannot be empty")
    if len(tokens) > max_model_len:
        raise invalid_value(
            f"This model's maximum context length is {max_model_len} tokens. However, your "
            f"prompt contains {len(tokens)} input tokens, which exceeds this limit even without "
            "any output tokens. Please reduce the length of the input prompt.",
            "input_tokens",
            len(tokens),
        )
    if not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise ApiError(f"Token id {max(tokens)} is out of vocabulary")


def _check_combinations(request: GenerateRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise invalid_combination(
            "Stream options can only be defined when `stream=True`.", "stream_options"
        )
    salt = request.cache_salt
    if salt is not None and (not salt or len(salt) > _MAX_SALT or set(salt) & set("@/\\\0")):
        raise invalid_combination(
            "Parameter cache_salt must be at most 128 characters and must not contain "
            "@, /, backslash, or NUL.",
            "cache_salt",
        )
    if request.seed is not None and abs(request.seed) > _INT64_MAX:
        raise invalid_body("body.seed", "less_than_equal", "Input should be an int64")
    if isinstance(request, ChatRequest):
        _check_chat(request)
    elif isinstance(request, CompletionRequest):
        if request.prompt in (None, ""):
            raise invalid_combination(
                "Either prompt or prompt_embeds must be provided and non-empty.", "prompt"
            )
        if request.logprobs is not None and request.logprobs < -1:
            raise invalid_combination("`logprobs` must be a positive value or -1.", "logprobs")


def _check_chat(request: ChatRequest) -> None:
    if request.top_logprobs is not None and request.top_logprobs < -1:
        raise invalid_combination("`top_logprobs` must be a positive value or -1.", "top_logprobs")
    if request.top_logprobs and not request.logprobs:
        raise invalid_combination(
            "when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs"
        )
    if request.tools == []:
        raise invalid_combination(
            "`tools` must not be an empty array. Either provide at least one tool or omit the "
            "field entirely.",
            "tools",
        )
    choice = request.tool_choice
    if choice in (None, "none"):
        return
    if request.tools is None:
        raise invalid_combination("When using `tool_choice`, `tools` must be set.", "tool_choice")
    if isinstance(choice, str) and choice not in ("auto", "required"):
        raise invalid_combination(
            f"Invalid value for `tool_choice`: {choice}! Only named tools, none, auto or "
            "required are supported.",
            "tool_choice",
        )


def _all_tokens(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
