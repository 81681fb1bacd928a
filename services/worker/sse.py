"""Server-sent events, cut out of a byte stream whose boundaries mean nothing."""

from __future__ import annotations

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class SseParser:
    """Collects bytes and gives back the data of every event that is complete.

    Follows the WHATWG event stream format: lines end in LF, CRLF or CR, an
    event ends at an empty line, several data lines are joined by LF, comments
    and other fields are skipped. Bytes are never decoded, so a character that
    is split over two reads stays whole.
    """

    def __init__(self) -> None:
        self._line: list[bytes] = []  # pieces of the line that is not complete yet
        self._data: list[bytes] = []  # data lines of the event that is not complete yet
        self._skip_newline = False  # the last read ended in CR; LF would belong to it
        self._at_start = True

    def feed(self, received: bytes) -> list[bytes]:
        """Data of the events that these bytes complete, in order."""
        if not received:
            return []
        if not self._line and not self._data and _is_whole(received):
            self._at_start = self._skip_newline = False
            return [event[6:] for event in received[:-2].split(b"\n\n")]
        if self._skip_newline and received.startswith(b"\n"):
            received = received[1:]
        self._skip_newline = received.endswith(b"\r")
        if b"\r" in received:
            received = received.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        first, newline, rest = received.partition(b"\n")
        self._line.append(first)
        if not newline:
            return []
        events: list[bytes] = []
        self._end_line(b"".join(self._line), events)
        *lines, last = rest.split(b"\n")
        for line in lines:
            self._end_line(line, events)
        self._line = [last] if last else []
        return events

    def close(self) -> list[bytes]:
        """Data of the last event if the stream ended without an empty line."""
        events: list[bytes] = []
        self._end_line(b"".join(self._line), events)
        self._end_line(b"", events)
        self._line = []
        return events

    def _end_line(self, line: bytes, events: list[bytes]) -> None:
        if self._at_start:
            self._at_start = False
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if not line:
            if self._data:
                events.append(b"\n".join(self._data))
                self._data = []
            return
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value.removeprefix(b" "))


def _is_whole(received: bytes) -> bool:
    """True if this is nothing but one-line events, as vLLM writes them."""
    return (
        received.startswith(b"data: ")
        and received.endswith(b"\n\n")
        and b"\r" not in received
        and received.count(b"\n") == 2 * received.count(b"\n\ndata: ") + 2
    )
