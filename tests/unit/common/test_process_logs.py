"""Log lines of processes that share a stderr stay lines."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest

_SAY_TWO_EVENTS = """
import structlog
from services.common.process import setup_logging
setup_logging(level="INFO", json={json})
for number in (1, 2):
    structlog.get_logger().info("counted", number=number)
"""


def _writes_to_stderr(code: str, *, unbuffered: bool) -> list[str]:
    """What each write of a Python program to its stderr carried."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            flags = ["-u"] if unbuffered else []
            subprocess.run(
                [sys.executable, *flags, "-c", code], stderr=theirs.fileno(), check=True, timeout=60
            )
        writes = []
        while packet := ours.recv(65536):
            writes.append(packet.decode())
        return writes


@pytest.mark.timeout(90)
@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize("as_json", [False, True])
def test_an_event_is_one_write_with_its_newline(as_json: bool, unbuffered: bool) -> None:
    writes = _writes_to_stderr(_SAY_TWO_EVENTS.format(json=as_json), unbuffered=unbuffered)
    assert [text.count("\n") for text in writes] == [1, 1]
    assert all(text.endswith("\n") for text in writes)
    if as_json:
        assert [json.loads(text)["number"] for text in writes] == [1, 2]
