"""Text to token ids and back, without loss and the same in every process.

Known words are one token each, with and without a space in front and with a
capital. Other lower-case words are cut into three letters per token; whatever is
left is one token per byte. English prose takes three to four characters per
token, as with real tokenizers.

Ids above all of these, up to the size of Qwen3's vocabulary, stand for words of
the form ` w123456`, so prompts recorded from a real model can be replayed.
"""

from __future__ import annotations

import codecs
import functools
import re
from collections.abc import Iterable, Sequence

from services.sim.vocabulary import FOREIGN, MARKS, WORDS

VOCAB_SIZE = 151_936

END_OF_TEXT, START_OF_TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TOOL_CALL, END_OF_TOOL_CALL = "<tool_call>", "</tool_call>"
_SPECIALS = (
    END_OF_TEXT,
    START_OF_TURN,
    END_OF_TURN,
    "<think>",
    "</think>",
    TOOL_CALL,
    END_OF_TOOL_CALL,
)
_NUM_HIDDEN = 3
"""Leading specials that decoding skips, as `skip_special_tokens` does."""

EOS_ID = _SPECIALS.index(END_OF_TURN)

_SPECIAL_IDS = {text: index for index, text in enumerate(_SPECIALS)}
_SPECIAL = re.compile("(" + "|".join(re.escape(text) for text in _SPECIALS) + ")")
_PIECE = re.compile(r" ?[^\W_]+| ?(?:[^\s\w]|_)|\s")

_FIRST_BYTE = len(_SPECIALS)
_FIRST_WORD = _FIRST_BYTE + 256
_WORD_TEXTS = tuple(
    dict.fromkeys(
        text
        for word in (*WORDS, *FOREIGN)
        for text in (word, f" {word}", word.capitalize(), f" {word.capitalize()}")
    )
)
_WORD_IDS = {text: _FIRST_WORD + index for index, text in enumerate(_WORD_TEXTS)}
_FIRST_TRIPLE = _FIRST_WORD + len(_WORD_TEXTS)
_TRIPLES = 26**3
_FIRST_SPACED_TRIPLE = _FIRST_TRIPLE + _TRIPLES
_FIRST_NUMBERED = _FIRST_SPACED_TRIPLE + _TRIPLES
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_NUMBERED = re.compile(r" w([1-9]\d{4,5})")
_LOWER_CASE = re.compile(r" ?[a-z]{3,}")

SPEAKABLE: tuple[int, ...] = tuple(
    [_WORD_IDS[f" {word}"] for word in dict.fromkeys((*WORDS, *FOREIGN))]
    + [_FIRST_BYTE + ord(mark) for mark in MARKS for _ in range(8)]
)
"""Ids that the model says. Any sequence of them survives decoding and encoding."""


class Tokenizer:
    """Encodes and decodes. Remembers how it cut the words it met last."""

    def __init__(self) -> None:
        self._ids_of_piece = functools.lru_cache(maxsize=65_536)(_split)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; special tokens in it count as such."""
        if "<" not in text:
            return self._encode_plain(text)
        ids: list[int] = []
        for part in _SPECIAL.split(text):
            special = _SPECIAL_IDS.get(part)
            if special is None:
                ids += self._encode_plain(part)
            else:
                ids.append(special)
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of token ids. Bytes that are no UTF-8 become U+FFFD."""
        return b"".join(_bytes(token, skip_special) for token in ids).decode(errors="replace")

    def _encode_plain(self, text: str) -> list[int]:
        cut = self._ids_of_piece
        return [token for piece in _PIECE.findall(text) for token in cut(piece)]


class Detokenizer:
    """Decodes a sequence token by token; a character cut in two comes out whole."""

    def __init__(self, *, skip_special: bool = True) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._skip_special = skip_special

    def add(self, token: int) -> str:
        """The text that this token completes."""
        return self._decoder.decode(_bytes(token, self._skip_special))


def token_text(token: int) -> str:
    """One token by itself, special tokens included."""
    return _bytes(token, False).decode(errors="replace")


def _split(piece: str) -> tuple[int, ...]:
    known = _WORD_IDS.get(piece)
    if known is not None:
        return (known,)
    if _LOWER_CASE.fullmatch(piece):
        return tuple(_split_letters(piece))
    numbered = _NUMBERED.fullmatch(piece)
    if numbered and _FIRST_NUMBERED <= int(numbered[1]) < VOCAB_SIZE:
        return (int(numbered[1]),)
    return tuple(_FIRST_BYTE + byte for byte in piece.encode(errors="surrogatepass"))


def _split_letters(piece: str) -> Iterable[int]:
    base = _FIRST_SPACED_TRIPLE if piece[0] == " " else _FIRST_TRIPLE
    letters = piece.lstrip(" ")
    for start in range(0, len(letters), 3):
        triple = letters[start : start + 3]
        if len(triple) == 3:
            first, second, third = (_LETTERS.index(letter) for letter in triple)
            yield base + (first * 26 + second) * 26 + third
        else:
            yield from (_FIRST_BYTE + ord(letter) for letter in triple)
        base = _FIRST_TRIPLE


@functools.lru_cache(maxsize=65_536)
def _bytes(token: int, skip_special: bool) -> bytes:
    if token < _FIRST_BYTE:
        return b"" if skip_special and token < _NUM_HIDDEN else _SPECIALS[token].encode()
    if token < _FIRST_WORD:
        return bytes((token - _FIRST_BYTE,))
    if token < _FIRST_TRIPLE:
        return _WORD_TEXTS[token - _FIRST_WORD].encode()
    if token < _FIRST_NUMBERED:
        space, code = divmod(token - _FIRST_TRIPLE, _TRIPLES)
        triple = (code // 676, code // 26 % 26, code % 26)
        return ((" " if space else "") + "".join(_LETTERS[index] for index in triple)).encode()
    return f" w{token}".encode()
