"""From tokens to text: stop strings, what they hold back, how a choice ends."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.sim.choices import Choice, StopStrings
from services.sim.sequence import Ending, Output
from services.sim.tokenizer import EOS_ID, Detokenizer, Tokenizer

_TOKENIZER = Tokenizer()


def _choice(*stops: str, include: bool = False, min_tokens: int = 0) -> Choice:
    return Choice(StopStrings(stops, include=include), Detokenizer(), min_tokens, include)


def _feed(choice: Choice, text: str) -> str:
    """Everything given out for a text, until the choice ends."""
    released = ""
    for token in _TOKENIZER.encode(text):
        delta = choice.add(Output(0, token, b"digest"))
        if delta is None:
            break
        released += delta.text
    return released


def test_text_comes_out_token_by_token() -> None:
    choice = _choice()
    tokens = _TOKENIZER.encode(" the world")
    deltas = [choice.add(Output(0, token, b"")) for token in tokens]
    assert [delta.text for delta in deltas if delta] == [" the", " world"]


def test_a_stop_string_ends_the_choice_and_is_not_shown() -> None:
    choice = _choice("or")
    assert _feed(choice, " the world is") == " the w"
    assert (choice.finish_reason, choice.stop_reason) == ("stop", "or")


def test_a_stop_string_is_shown_if_asked_for() -> None:
    choice = _choice("or", include=True)
    assert _feed(choice, " the world is") == " the wor"


def test_a_stop_string_over_several_tokens_is_found_and_never_leaks() -> None:
    choice = _choice("the world")
    assert _feed(choice, " hear the world is") == " hear "


def test_no_stop_string_is_searched_before_min_tokens() -> None:
    choice = _choice(" the", min_tokens=2)
    assert _feed(choice, " the world the end") == " the world"


def test_what_was_held_back_comes_with_the_end() -> None:
    choice = _choice("something long")
    assert _feed(choice, " the world") == ""
    end = choice.add(Output(0, EOS_ID, b"", Ending.STOP))
    assert end is not None
    assert (end.text, end.finish_reason, end.stop_reason) == (" the world", "stop", None)
    assert choice.text == " the world"


def test_after_the_end_nothing_more_comes() -> None:
    choice = _choice()
    choice.add(Output(0, 300, b"", Ending.LENGTH))
    assert choice.add(Output(0, 300, b"")) is None


def test_a_stop_token_is_counted_but_not_shown() -> None:
    choice = _choice()
    (token,) = _TOKENIZER.encode(" the")
    delta = choice.add(Output(0, token, b"", Ending.STOP, stop_token=token))
    assert delta is not None
    assert (delta.text, delta.tokens, delta.stop_reason) == ("", [token], token)


@given(
    st.lists(st.text("ab", max_size=4), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=3),
    st.booleans(),
)
def test_pieces_are_cut_where_the_whole_text_would_be(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    watcher = StopStrings(stops, include=include)
    released = ""
    found = None
    for piece in pieces:
        found = watcher.add(piece, searching=True)
        released += watcher.release(finished=found is not None)
        if found:
            break
    released += watcher.release(finished=True)
    text = "".join(pieces)
    places = [(text.find(stop), stop) for stop in stops if stop in text]
    assert (found is None) == (not places)
    if found is None:
        assert released == text
    else:
        # A longer stop string may begin earlier and end later than the one found.
        shown = released.removesuffix(found) if include else released
        assert text.startswith(shown + found)
