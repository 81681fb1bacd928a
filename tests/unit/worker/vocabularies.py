"""Small tokenizers of the kinds that models have, without a download."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from tokenizers.decoders import DecodeStream

SCRIPTS = (
    "The tide comes in twice a day. ",
    "Ebbe und Flut, größer als gestern; ça va ? ",
    "Прилив приходит дважды в день. ",
    "潮汐每天来两次。満潮です。",
    "밀물이 들어옵니다. ",
    "المد يأتي مرتين ",
    "ज्वार दिन में दो बार आता है। ",
    "น้ำขึ้นวันละสองครั้ง",
    "👩‍👩‍👧 🌊🏄🏽 ",
    "\n\n  def wave(x):\n\treturn  x\n",
)
"""Texts that tokenizers cut in different ways."""

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer, and how to make tokens with it.

    Attributes:
        tokenizer: of the library that vLLM decodes with.
        byte_names: the tokens of single bytes, by byte.
        judges_bytes_by_runs: one wrong byte spoils all bytes in a row with it.
    """

    tokenizer: Tokenizer
    byte_names: Sequence[str]
    judges_bytes_by_runs: bool

    @property
    def size(self) -> int:
        """Number of tokens."""
        return self.tokenizer.get_vocab_size()

    @property
    def special(self) -> int:
        """A token without text where special ones are skipped."""
        return self.in_vocabulary(_SPECIAL[0])

    def in_vocabulary(self, name: str) -> int:
        """Id of a token."""
        found = self.tokenizer.token_to_id(name)
        assert found is not None, name
        return found

    def text(self, text: str) -> list[int]:
        """Tokens of a text."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def in_bytes(self, data: bytes) -> list[int]:
        """A token for each byte."""
        return [self.in_vocabulary(self.byte_names[byte]) for byte in data]

    def decoder(self, skip_special_tokens: bool) -> Callable[[Sequence[int]], str]:
        """The text of tokens."""
        return lambda ids: self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def stream(self, prompt: Sequence[int], skip_special_tokens: bool) -> Any:
        """A decode stream after a prompt, as vLLM makes it."""
        return DecodeStream(ids=list(prompt), skip_special_tokens=skip_special_tokens)


@functools.cache
def byte_level() -> Vocabulary:
    """GPT-2's kind, which Qwen, Llama 3, DeepSeek and most others have: bytes all through."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        SCRIPTS * 3,
        trainers.BpeTrainer(
            vocab_size=420,
            special_tokens=list(_SPECIAL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return Vocabulary(tokenizer, _byte_level_alphabet(), judges_bytes_by_runs=False)


@functools.cache
def byte_fallback() -> Vocabulary:
    """SentencePiece's kind, which Llama 2, Mistral 7B and Gemma have: bytes for what is rare."""
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = sorted(set("▁".join(SCRIPTS[:3])))
    vocabulary = {name: index for index, name in enumerate(["<unk>", *names, *letters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in _SPECIAL])
    return Vocabulary(tokenizer, names, judges_bytes_by_runs=True)


VOCABULARIES = (byte_level, byte_fallback)


def _byte_level_alphabet() -> list[str]:
    """The letter for each byte."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte if byte in shown else 256 + hidden.index(byte)) for byte in range(256)]
