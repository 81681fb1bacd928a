"""What the simulated model must answer, by its own rule and without any engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.sim import chat_template
from services.sim.kv import Content, KvReader, start_digest
from services.sim.model import SimModel
from services.sim.tokenizer import Tokenizer

_NEVER_ENDS = 0


class Referee:
    """Knows every right answer. KV that is not what it should be shows as another one.

    Args:
        model: served model name, which is what decides.
        block_size: of the engines.
    """

    def __init__(self, model: str, block_size: int) -> None:
        self._start = start_digest(model)
        self._block_size = block_size
        self._model = SimModel(_NEVER_ENDS)
        self._tokenizer = Tokenizer()

    def tokens(self, prompt: Sequence[int], count: int) -> list[int]:
        """The answer to token ids, in token ids.

        Args:
            prompt: token ids.
            count: tokens of the answer.
        """
        memory: dict[int, Content] = {}
        blocks = range(len(prompt) + count)
        reader = KvReader(memory, self._block_size, self._start)
        reader.write(blocks, prompt)
        answer: list[int] = []
        while True:
            answer.append(self._model.next_token(reader.digest(blocks), may_end=False))
            if len(answer) == count:
                return answer
            reader.write(blocks, answer[-1:])

    def text(self, messages: Sequence[dict[str, Any]], count: int) -> str:
        """The answer to a chat, in words.

        Args:
            messages: the whole history.
            count: tokens of the answer.
        """
        prompt = self._tokenizer.encode(chat_template.render(messages))
        return self._tokenizer.decode(self.tokens(prompt, count))
