"""What the engine's decode streams get of a prompt, and that answers read the same."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from services.worker import engine_plugin
from services.worker.engine_detokenizer import TAIL_TOKENS, register, start_with_tail, tail
from services.worker.engine_events import EVENTS_SOCKET
from tests.unit.worker.vocabularies import SCRIPTS, VOCABULARIES, Vocabulary

_MODULE = "vllm.v1.engine.detokenizer"
_SHORT, _MIDDLE, _LONG = TAIL_TOKENS
_SILENT, _UNFINISHED = -1, -2


def _read(ids: Sequence[int]) -> str:
    """A letter for each token but special ones, and for incomplete characters."""
    return "".join("" if i == _SILENT else "\ufffd" if i == _UNFINISHED else "x" for i in ids)


def test_a_long_prompt_is_cut_to_its_last_tokens() -> None:
    prompt = list(range(5000))
    assert tail(prompt, _read) == prompt[-_SHORT:]


@pytest.mark.parametrize("length", [0, 1, _SHORT])
def test_a_short_prompt_is_left_alone_and_not_decoded(length: int) -> None:
    prompt = list(range(length))

    def refuse(ids: Sequence[int]) -> str:
        raise AssertionError(ids)

    assert tail(prompt, refuse) is prompt


@pytest.mark.parametrize("last", [_SILENT, _UNFINISHED])
@pytest.mark.parametrize(
    ("count", "kept"), [(_SHORT - 1, _SHORT), (_SHORT, _MIDDLE), (_MIDDLE, _LONG), (_LONG, 5000)]
)
def test_an_end_without_text_is_too_short_to_tell(last: int, count: int, kept: int) -> None:
    """So many special tokens, or bytes that only the token before them makes a character."""
    prompt = [*range(5000 - count), *[last] * count]

    def read(ids: Sequence[int]) -> str:
        whole = _read([i for i in ids if i != _UNFINISHED])
        return whole or _read(ids)

    assert tail(prompt, read) == prompt[-kept:]


def test_an_end_in_the_middle_of_a_character_leaves_the_whole_prompt() -> None:
    prompt = [*range(5000), _UNFINISHED]
    assert tail(prompt, _read) is prompt


class _Detokenizer:
    """What vLLM's reads of a request."""

    def __init__(self, tokenizer: Any, request: Any) -> None:
        self.tokenizer = tokenizer
        self.primed_with = request.prompt_token_ids
        self.request_id = request.request_id
        self.skips = request.sampling_params.skip_special_tokens


class _Tokenizer:
    """The tokenizer in vLLM's, which remembers how it was asked."""

    def __init__(self) -> None:
        self._tokenizer = self
        self.asked: list[tuple[int, bool]] = []

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        self.asked.append((len(ids), skip_special_tokens))
        return _read(ids)


@pytest.fixture
def detokenizer() -> type[_Detokenizer]:
    """A class of its own for each test."""
    return type("Detokenizer", (_Detokenizer,), {"__init__": _Detokenizer.__init__})


def _request(prompt: list[int] | None, *, skip: bool = True) -> Any:
    return SimpleNamespace(
        request_id="request-1",
        prompt_token_ids=prompt,
        sampling_params=SimpleNamespace(skip_special_tokens=skip),
    )


@pytest.mark.parametrize("skip", [True, False])
def test_a_detokenizer_sees_the_end_of_the_prompt_and_all_else_of_the_request(
    detokenizer: type[_Detokenizer], skip: bool
) -> None:
    start_with_tail(detokenizer)
    tokenizer, request = _Tokenizer(), _request(list(range(5000)), skip=skip)
    made = detokenizer(tokenizer, request)
    assert made.primed_with == list(range(5000 - _SHORT, 5000))
    assert (made.tokenizer, made.request_id, made.skips) == (tokenizer, "request-1", skip)
    assert tokenizer.asked == [(_SHORT, skip)]
    assert len(request.prompt_token_ids) == 5000, "the request itself is changed"


def test_a_prompt_of_embeddings_is_left_alone(detokenizer: type[_Detokenizer]) -> None:
    start_with_tail(detokenizer)
    assert detokenizer(_Tokenizer(), _request(None)).primed_with is None


def test_a_plugin_that_is_loaded_twice_changes_nothing_more(
    detokenizer: type[_Detokenizer],
) -> None:
    start_with_tail(detokenizer)
    once = detokenizer.__init__
    start_with_tail(detokenizer)
    assert detokenizer.__init__ is once
    tokenizer = _Tokenizer()
    detokenizer(tokenizer, _request(list(range(5000))))
    assert len(tokenizer.asked) == 1


def test_its_first_use_is_said_once(
    detokenizer: type[_Detokenizer], caplog: pytest.LogCaptureFixture
) -> None:
    """And not before: plugins are loaded before vLLM sets up its logs."""
    caplog.set_level(logging.INFO, "vllm.kvloop")
    start_with_tail(detokenizer)
    assert not caplog.messages
    for _ in range(2):
        detokenizer(_Tokenizer(), _request(list(range(5000))))
    assert caplog.messages == ["kvloop: decode streams get the end of a prompt alone"]


class _OtherTokenizer:
    """One that is not built on `tokenizers`: it has no other within."""


class _FailingTokenizer:
    """One whose tokenizer cannot decode this."""

    def __init__(self) -> None:
        self._tokenizer = SimpleNamespace(decode=self._decode)

    def _decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        raise OverflowError(f"{ids[0]} is the client's")


class _PanickingTokenizer:
    """One whose Rust code panics, as `tokenizers` does with this decoder."""

    def __init__(self) -> None:
        self._tokenizer = Tokenizer(models.BPE({"x": 0}, []))
        self._tokenizer.decoder = decoders.Strip(content="x", left=0, right=3)


def test_such_a_panic_is_no_exception_of_the_usual_kind() -> None:
    with pytest.raises(BaseException, match="out of bounds") as panic:
        _PanickingTokenizer()._tokenizer.decode([0])
    assert not isinstance(panic.value, Exception)


@pytest.mark.parametrize(
    "end", [KeyboardInterrupt, SystemExit, asyncio.CancelledError, GeneratorExit]
)
def test_what_ends_the_process_or_a_task_passes(
    detokenizer: type[_Detokenizer], end: type[BaseException]
) -> None:
    def decode(ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        raise end

    start_with_tail(detokenizer)
    tokenizer = SimpleNamespace(_tokenizer=SimpleNamespace(decode=decode))
    with pytest.raises(end):
        detokenizer(tokenizer, _request(list(range(5000))))


@pytest.mark.parametrize("tokenizer", [_OtherTokenizer, _FailingTokenizer, _PanickingTokenizer])
def test_a_prompt_whose_end_cannot_be_decoded_is_left_whole_and_it_is_said_once(
    detokenizer: type[_Detokenizer],
    tokenizer: Callable[[], Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "vllm.kvloop")
    start_with_tail(detokenizer)
    for _ in range(2):
        request = _request([0] * 5000)
        assert detokenizer(tokenizer(), request).primed_with is request.prompt_token_ids
    (said,) = caplog.messages
    assert "prompts are decoded whole" in said


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch, detokenizer: type[_Detokenizer]) -> ModuleType:
    """vLLM's module, as far as it is looked at."""
    module = ModuleType(_MODULE)
    module.__dict__["FastIncrementalDetokenizer"] = detokenizer
    monkeypatch.setitem(sys.modules, _MODULE, module)
    return module


def test_beside_a_sidecar_vllms_detokenizer_is_changed(
    monkeypatch: pytest.MonkeyPatch, vllm: ModuleType
) -> None:
    monkeypatch.setenv(EVENTS_SOCKET, "/run/decode.sock")
    register()
    made = vllm.FastIncrementalDetokenizer(_Tokenizer(), _request(list(range(5000))))
    assert len(made.primed_with) == _SHORT


@pytest.mark.parametrize("socket", [None, ""])
def test_without_a_sidecar_vllm_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch, vllm: ModuleType, socket: str | None
) -> None:
    monkeypatch.delenv(EVENTS_SOCKET, raising=False)
    if socket is not None:
        monkeypatch.setenv(EVENTS_SOCKET, socket)
    before = vllm.FastIncrementalDetokenizer.__init__
    engine_plugin.register()
    assert vllm.FastIncrementalDetokenizer.__init__ is before


def test_a_vllm_with_another_detokenizer_starts_all_the_same_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, vllm: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(EVENTS_SOCKET, "/run/decode.sock")
    del vllm.FastIncrementalDetokenizer
    register()
    assert "prompts are decoded whole" in caplog.text


@st.composite
def _tokens(draw: st.DrawFn, vocabulary: Vocabulary, *, most: int) -> list[int]:
    """Text in several scripts, special tokens, whole and incomplete characters in bytes,
    and tokens at random."""
    piece = st.one_of(
        st.sampled_from(SCRIPTS).map(vocabulary.text),
        st.text(max_size=8).map(vocabulary.text),
        st.sampled_from([1, 3, _SHORT - 1, _SHORT, _MIDDLE]).map(
            lambda count: [vocabulary.special] * count
        ),
        st.tuples(st.sampled_from("é中🌊\ufffd"), st.integers(1, 4)).map(
            lambda cut: vocabulary.in_bytes(cut[0].encode()[: cut[1]])
        ),
        st.lists(st.integers(0, vocabulary.size - 1), max_size=5),
        st.just(vocabulary.text("<|im_end|>\n<|im_start|>assistant\n")),
    )
    return [token for tokens in draw(st.lists(piece, max_size=most)) for token in tokens]


def _texts(vocabulary: Vocabulary, primed: Sequence[int], answer: list[int], skip: bool) -> Any:
    """What each token of an answer adds, as vLLM has it: a stream that fails is begun anew."""
    stream = vocabulary.stream(primed, skip)
    texts = []
    for token in answer:
        try:
            text = stream.step(vocabulary.tokenizer, token)
        except Exception as error:
            if not str(error).startswith("Invalid prefix encountered"):
                raise
            stream = vocabulary.stream((), skip)
            text = stream.step(vocabulary.tokenizer, token)
        texts.append(text)
    return texts


@pytest.mark.parametrize("make", VOCABULARIES, ids=lambda make: make.__name__)
def test_answers_read_as_after_the_whole_prompt(make: Callable[[], Vocabulary]) -> None:
    vocabulary = make()
    hello = vocabulary.text("hello")
    seen: set[int] = set()

    @example(filler=2000, end=[], answer=hello, skip=True)
    @example(filler=2000, end=[vocabulary.special] * _SHORT, answer=hello, skip=True)
    @example(filler=2000, end=[vocabulary.special] * _MIDDLE, answer=hello, skip=True)
    @example(filler=2000, end=[vocabulary.special] * _LONG, answer=hello, skip=True)
    @settings(max_examples=400)
    @given(
        filler=st.sampled_from([0, 30, 300, 2000]),
        end=_tokens(vocabulary, most=5),
        answer=_tokens(vocabulary, most=4),
        skip=st.booleans(),
    )
    def check(filler: int, end: list[int], answer: list[int], skip: bool) -> None:
        prompt = (vocabulary.text("".join(SCRIPTS)) * 100)[:filler] + end
        end_of_it = tail(prompt, vocabulary.decoder(skip))
        whole = vocabulary.decoder(skip)(prompt)
        if len(end_of_it) < len(prompt) and whole.endswith("\ufffd"):
            # Bytes that are no text, long before bytes that are. vLLM sends the prompt itself
            # to the client then; that it does not any more is no loss.
            assert vocabulary.judges_bytes_by_runs
            return
        seen.add(len(end_of_it))
        read = _texts(vocabulary, end_of_it, answer, skip)
        assert read == _texts(vocabulary, prompt, answer, skip)

    check()
    assert seen >= {_SHORT, _MIDDLE, _LONG, 2000 + _LONG}


@pytest.mark.parametrize("make", VOCABULARIES, ids=lambda make: make.__name__)
def test_too_short_an_end_would_show(make: Callable[[], Vocabulary]) -> None:
    """Half a character at the prompt's end, whose other half is the answer's first token."""
    vocabulary = make()
    wave = vocabulary.in_bytes("🌊".encode())
    prompt = [*vocabulary.text("".join(SCRIPTS)), *wave[:2]]
    answer = [*wave[2:], *vocabulary.text("x")]
    kept = tail(prompt, vocabulary.decoder(True))
    assert kept == prompt
    assert _texts(vocabulary, prompt[-1:], answer, True) != _texts(vocabulary, kept, answer, True)
