"""The assistant's message, put together from what the engine writes.

Needed for conversations without an id, which are found again by their history.
"""

from __future__ import annotations

import msgspec

from services.common import history_digest


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    index: int | None = None
    function: _Function | None = None


class _Said(msgspec.Struct):
    content: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct):
    delta: _Said | None = None
    message: _Said | None = None


class _Piece(msgspec.Struct):
    choices: list[_Choice] = []


_PIECE = msgspec.json.Decoder(_Piece)


class AnswerReader:
    """Collects the first choice of a chat answer, from chunks or a whole reply."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._calls: dict[int, tuple[list[str], list[str]]] = {}
        self._readable = True

    def add(self, piece: bytes) -> None:
        """Take in one chunk, or the whole reply."""
        try:
            choices = _PIECE.decode(piece).choices
        except msgspec.DecodeError:
            self._readable = False
            return
        said = choices[0].delta or choices[0].message if choices else None
        if said is None:
            return
        if said.content:
            self._text.append(said.content)
        for place, call in enumerate(said.tool_calls or ()):
            index = call.index if call.index is not None else place
            names, arguments = self._calls.setdefault(index, ([], []))
            if call.function is not None:
                names.append(call.function.name or "")
                arguments.append(call.function.arguments or "")

    def messages(self) -> list[history_digest.Message] | None:
        """The message so far; None if a piece could not be read."""
        if not self._readable:
            return None
        calls = [("".join(n), "".join(a)) for _, (n, a) in sorted(self._calls.items())]
        return [history_digest.answer("".join(self._text), calls)]
