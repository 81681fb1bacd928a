"""Server-sent events as vLLM frames them."""

from __future__ import annotations

from typing import Protocol

import msgspec

DONE = b"data: [DONE]\n\n"
"""Ends streams of choices."""


class Framing(Protocol):
    """The form of one stream. Made anew for each."""

    def event(self, data: bytes) -> bytes:
        """One event with what the engine wrote."""

    def error(self, body: bytes) -> bytes:
        """The event that tells of an error.

        Args:
            body: the error as a reply of its own.
        """

    def end(self) -> bytes:
        """What ends the stream."""


class ChoiceFraming:
    """Streams of chat and text completions. See `Framing`."""

    def event(self, data: bytes) -> bytes:
        """See `Framing.event`."""
        return event(data)

    def error(self, body: bytes) -> bytes:
        """See `Framing.error`. vLLM writes it as it writes a reply."""
        return event(body)

    def end(self) -> bytes:
        """See `Framing.end`."""
        return DONE


class ResponseFraming:
    """Streams of responses, whose events have names. See `Framing`."""

    def __init__(self) -> None:
        self._sent = 0

    def event(self, data: bytes) -> bytes:
        """See `Framing.event`. The name is the data's own type, as in vLLM."""
        self._sent += 1
        try:
            name = _TYPED.decode(data).type
        except msgspec.DecodeError:
            return event(data)
        if not name.isprintable():
            return event(data)
        return b"event: " + name.encode() + b"\n" + event(data)

    def error(self, body: bytes) -> bytes:
        """See `Framing.error`. The form is OpenAI's."""
        try:
            found = _ERROR.decode(body).error
        except msgspec.DecodeError:  # an engine's, in a form of its own
            found = _Error(message=body.decode(errors="replace"))
        return self.event(
            msgspec.json.encode(
                {
                    "type": "error",
                    "sequence_number": self._sent,
                    "code": None if found.code is None else str(found.code),
                    "message": found.message,
                    "param": found.param,
                }
            )
        )

    def end(self) -> bytes:
        """See `Framing.end`. The last event says that it is the last."""
        return b""


def event(data: bytes) -> bytes:
    """One event.

    Args:
        data: what the engine wrote; a line break in it starts another data line,
            as it did there.
    """
    if b"\n" in data:
        data = data.replace(b"\n", b"\ndata: ")
    return b"data: " + data + b"\n\n"


class _Typed(msgspec.Struct):
    type: str


class _Error(msgspec.Struct):
    message: str = ""
    param: str | None = None
    code: int | str | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error


_TYPED = msgspec.json.Decoder(_Typed)
_ERROR = msgspec.json.Decoder(_ErrorBody)
