"""The tokenizer loses nothing, and what the model says stays the same tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.sim.tokenizer import (
    END_OF_TURN,
    EOS_ID,
    SPEAKABLE,
    START_OF_TURN,
    VOCAB_SIZE,
    Detokenizer,
    Tokenizer,
)

_TOKENIZER = Tokenizer()
_TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(_TEXT)
def test_any_text_survives_encoding(text: str) -> None:
    ids = _TOKENIZER.encode(text)
    assert _TOKENIZER.decode(ids, skip_special=False) == text
    assert all(0 <= token < VOCAB_SIZE for token in ids)


@given(st.lists(st.sampled_from(SPEAKABLE)))
def test_what_the_model_says_is_encoded_to_the_same_tokens(ids: list[int]) -> None:
    assert _TOKENIZER.encode(_TOKENIZER.decode(ids)) == ids


@given(st.lists(st.sampled_from(SPEAKABLE), min_size=1))
def test_an_answer_keeps_its_tokens_inside_a_chat(ids: list[int]) -> None:
    before = _TOKENIZER.encode(f"{START_OF_TURN}assistant\n")
    text = f"{START_OF_TURN}assistant\n{_TOKENIZER.decode(ids)}{END_OF_TURN}\n"
    assert _TOKENIZER.encode(text)[: len(before) + len(ids) + 1] == [*before, *ids, EOS_ID]


@given(st.lists(st.integers(0, VOCAB_SIZE - 1)))
def test_any_token_has_a_text_and_streams_to_the_same(ids: list[int]) -> None:
    whole = _TOKENIZER.decode(ids)
    stream = Detokenizer()
    pieces = "".join(stream.add(token) for token in ids)
    assert whole.startswith(pieces)
    assert set(whole[len(pieces) :]) <= {"\N{REPLACEMENT CHARACTER}"}  # an unfinished character


@pytest.mark.parametrize("character", ["é", "ł", "界", "🚀"])
def test_a_character_in_several_tokens_comes_out_whole(character: str) -> None:
    ids = _TOKENIZER.encode(character)
    stream = Detokenizer()
    pieces = [stream.add(token) for token in ids]
    assert len(ids) == len(character.encode())
    assert pieces == [""] * (len(ids) - 1) + [character]


def test_prose_takes_about_as_many_tokens_as_with_real_tokenizers() -> None:
    text = (
        "Disaggregated serving separates prefill from decode, so that each phase can be scaled "
        "and tuned on its own. The router chooses workers by load, and a conversation sticks to "
        "the decode engine that holds its keys and values."
    )
    assert 2.5 < len(text) / len(_TOKENIZER.encode(text)) < 5


def test_ids_of_a_larger_vocabulary_can_be_replayed() -> None:
    ids = [40_000, 151_935, 100_000]
    assert _TOKENIZER.encode(_TOKENIZER.decode(ids)) == ids


def test_special_tokens_are_hidden_in_answers_and_found_in_prompts() -> None:
    assert _TOKENIZER.decode([EOS_ID]) == ""
    assert _TOKENIZER.encode(END_OF_TURN) == [EOS_ID]
