"""The first text of an answer without decoding the whole prompt.

vLLM turns tokens into text with a decode stream per request, which it gives the
whole prompt: how a token reads can depend on those before it. The stream decodes all
of that with the first token, which takes about 0.3 µs per token of the prompt, in both legs,
before the first token is sent. Only the prompt's end matters, so here the stream
gets no more than that.

Part of kvloop's plugin of vLLM (engine_plugin.py).
Runs inside vLLM: imports only the standard library, vLLM, and siblings that do the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from services.worker.engine_log import logger, said_once

TAIL_TOKENS = (16, 128, 1024)
"""Lengths of the prompt's end that are tried, shortest first."""
_UNFINISHED = "\ufffd"
"""What the bytes of an incomplete character decode to."""

_PANIC = ("pyo3_runtime", "PanicException")
"""Module and name of the class of a Rust panic in Python."""

_USED = "kvloop: decode streams get the end of a prompt alone"
_UNABLE = "kvloop: the end of a prompt cannot be decoded by itself; prompts are decoded whole"


def register() -> None:
    """Shorten the prompts of decode streams in this process."""
    try:
        from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer
    except ImportError:
        logger.warning("kvloop: this vLLM has another detokenizer; prompts are decoded whole")
        return
    start_with_tail(FastIncrementalDetokenizer)


def start_with_tail(detokenizer: type) -> None:
    """Let a detokenizer of vLLM see no more of a prompt than its end.

    Args:
        detokenizer: made with a tokenizer and a request, of which it reads
            `prompt_token_ids` for nothing but its decode stream.
    """
    original: Any = detokenizer.__init__  # type: ignore[misc]
    if hasattr(original, "kvloop_original"):
        return  # vLLM may load plugins more than once

    say = said_once()

    def init(self: Any, tokenizer: Any, request: Any) -> None:
        try:
            shortened = _Shortened(request, _decoder(tokenizer, request))
        except BaseException as error:
            # Another kind of tokenizer, say: no reason to fail a request, let alone the engine.
            if not isinstance(error, Exception) and not _is_panic(error):
                raise
            say(logging.WARNING, _UNABLE)
            shortened = request
        else:
            say(logging.INFO, _USED)
        original(self, tokenizer, shortened)

    init.kvloop_original = original  # type: ignore[attr-defined]
    detokenizer.__init__ = init  # type: ignore[misc]


def tail(token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> Sequence[int]:
    """As much of a prompt's end as decides how the next token reads.

    That is an end that has some text (special tokens may have none), and does not
    stop in the middle of a character; else the whole prompt.

    Args:
        token_ids: the prompt.
        decode: as the decode stream will.
    """
    for length in TAIL_TOKENS:
        if len(token_ids) <= length:
            break
        end = token_ids[-length:]
        text = decode(end)
        if text and not text.endswith(_UNFINISHED):
            return end
    return token_ids


def _is_panic(error: BaseException) -> bool:
    """True for a bug of `tokenizers`, whose Rust code raises it past `except Exception`.

    Its class cannot be imported.
    """
    return (type(error).__module__, type(error).__name__) == _PANIC


def _decoder(tokenizer: Any, request: Any) -> Callable[[Sequence[int]], str]:
    skip = request.sampling_params.skip_special_tokens
    return lambda ids: tokenizer._tokenizer.decode(ids, skip_special_tokens=skip)


class _Shortened:
    """A request with the end of its prompt in the prompt's place."""

    def __init__(self, request: Any, decode: Callable[[Sequence[int]], str]) -> None:
        self._request = request
        whole = request.prompt_token_ids
        # Prompts of embeddings have no tokens.
        self.prompt_token_ids = whole if whole is None else tail(whole, decode)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)
