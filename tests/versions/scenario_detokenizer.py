"""Drives kvloop's plugin and the detokenizer that it changes, against one version's sources.

Run in a process of its own, with that version first on PYTHONPATH; prints "ok". Detokenizer,
sampling parameters and the loading of plugins are the version's own.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from services.worker.engine_detokenizer import TAIL_TOKENS
from tests.versions.stand_ins import stand_in_for_gguf

_GROUP = "vllm.general_plugins"


def main() -> None:
    """Detokenize with the prompt's end as with the whole prompt."""
    stand_in_for_gguf()
    from vllm.v1.engine import detokenizer
    from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

    _the_api_server_loads_plugins()
    untouched = FastIncrementalDetokenizer.__init__
    os.environ.pop("KVLOOP_EVENTS_SOCKET", None)
    _plugins("kvloop")["kvloop"]()
    assert FastIncrementalDetokenizer.__init__ is untouched, "changed without a sidecar"
    os.environ["KVLOOP_EVENTS_SOCKET"] = "/nowhere"
    assert "kvloop" not in _plugins("none"), "it cannot be switched off"

    text = _Text()
    cases = list(itertools.product((True, False), repeat=2))
    with _primed(detokenizer) as primed:
        as_it_is = [_detokenize(text, *case) for case in cases]
        assert primed == [text.prompt] * len(cases), primed
        primed.clear()
        _plugins("kvloop")["kvloop"]()
        assert FastIncrementalDetokenizer.__init__ is not untouched
        with_plugin = [_detokenize(text, *case) for case in cases]
        assert primed == [text.prompt[-TAIL_TOKENS[0] :]] * len(cases), primed
    for case, left, right in zip(cases, as_it_is, with_plugin, strict=True):
        assert left == right, (case, left, right)
    sys.stdout.write("ok\n")


def _the_api_server_loads_plugins() -> None:
    """It makes its arguments before it makes a detokenizer, of requests of this kind."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine import EngineCoreRequest

    assert "load_general_plugins" in EngineArgs.__post_init__.__code__.co_names
    assert "prompt_token_ids" in EngineCoreRequest.__struct_fields__


def _plugins(allowed: str) -> dict[str, Any]:
    """What this version finds of what is installed."""
    from vllm.plugins import load_plugins_by_group

    os.environ["VLLM_PLUGINS"] = allowed
    found: dict[str, Any] = load_plugins_by_group(_GROUP)
    return found


class _Text:
    """A tokenizer as vLLM has it, of bytes and special tokens, and a long prompt's answer."""

    def __init__(self) -> None:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {letter: index for index, letter in enumerate(letters)}
        tokenizer = Tokenizer(models.BPE(vocabulary, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(["<|end|>", "<|start|>"])
        end, start = len(letters), len(letters) + 1
        wave = tokenizer.encode("🌊 and a wave").ids
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
        self.prompt = [*tokenizer.encode("The tide. " * 30).ids, end, start, *wave]
        self.answer = [*wave, start, end, *tokenizer.encode("größer").ids, end]


class _Request:
    """A request that counts how often its prompt is read.

    Attributes:
        prompt_embeds: as in requests that have tokens.
        request_id: its name.
        sampling_params: the version's own.
        reads: so often.
    """

    prompt_embeds = None
    request_id = "request-1"

    def __init__(self, prompt: list[int], sampling_params: Any) -> None:
        self.sampling_params = sampling_params
        self.reads = 0
        self._prompt = prompt

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt."""
        self.reads += 1
        return self._prompt


def _detokenize(text: _Text, skip: bool, spaces: bool) -> tuple[dict[str, Any], list[Any]]:
    """What a detokenizer has after an answer, but for its stream, and what it said of it.

    Args:
        text: what is said.
        skip: special tokens have no text.
        spaces: between special tokens that have.
    """
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer, IncrementalDetokenizer

    params = SamplingParams(
        skip_special_tokens=skip, spaces_between_special_tokens=spaces, stop=["never"]
    )
    request = _Request(text.prompt, params)
    made = IncrementalDetokenizer.from_new_request(text.tokenizer, request)
    assert type(made) is FastIncrementalDetokenizer, made
    said: list[Any] = []
    for token in text.answer:
        said.append(made.update([token], False))
        said.append(made.get_next_output_text(False, True))
        said.append((made.num_output_tokens(), list(made.output_token_ids)))
    said.append(made.get_next_output_text(True, False))
    assert said[-1].endswith("größer" if skip else "größer<|end|>"), said
    assert request.reads == 1, "the prompt is read for more than the stream"
    kept = {name: value for name, value in vars(made).items() if name != "stream"}
    # Else it could be read later.
    assert not any(type(value).__name__ in ("_Request", "_Shortened") for value in kept.values())
    return kept, said


@contextmanager
def _primed(detokenizer: Any) -> Iterator[list[list[int]]]:
    """What decode streams are primed with while the block runs."""
    streams = detokenizer.tokenizers.decoders
    original = streams.DecodeStream
    seen: list[list[int]] = []

    def make(ids: list[int], skip_special_tokens: bool) -> Any:
        seen.append(list(ids))
        return original(ids=ids, skip_special_tokens=skip_special_tokens)

    streams.DecodeStream = make
    try:
        yield seen
    finally:
        streams.DecodeStream = original


if __name__ == "__main__":
    main()
