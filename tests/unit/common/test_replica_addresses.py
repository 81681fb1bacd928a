"""Which addresses of a name are called."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Collection

import pytest

from services.common import replica_addresses
from services.common.replica_addresses import KEEP_SECONDS, ReplicaAddresses, target_of


class _Names:
    """A name server, and the clock of who asks it."""

    def __init__(self, *addresses: str) -> None:
        self.addresses: Collection[str] = addresses
        self.error: Exception | None = None
        self.now = 100.0
        self.known = ReplicaAddresses("kvmeta", 70, look_up=self._answer, clock=lambda: self.now)

    async def _answer(self, host: str) -> Collection[str]:
        assert host == "kvmeta"
        if self.error is not None:
            raise self.error
        return self.addresses

    async def target_with(self, *addresses: str) -> str | None:
        """The target after a look-up that found these."""
        self.addresses = addresses
        await self.known.refresh()
        return self.known.target


async def test_what_was_never_found_is_no_target() -> None:
    assert _Names().known.target is None
    assert await _Names().target_with() is None


async def test_an_address_is_called_for_a_minute_after_it_was_last_found() -> None:
    names = _Names()
    assert await names.target_with("10.0.0.1", "10.0.0.2") == "ipv4:10.0.0.1:70,10.0.0.2:70"
    names.now += KEEP_SECONDS - 1
    assert await names.target_with("10.0.0.2") == "ipv4:10.0.0.1:70,10.0.0.2:70"
    names.now += 1
    assert await names.target_with("10.0.0.2") == "ipv4:10.0.0.2:70"


async def test_an_address_that_comes_back_is_as_good_as_new() -> None:
    names = _Names()
    await names.target_with("10.0.0.1", "10.0.0.2")
    names.now += KEEP_SECONDS - 1
    await names.target_with("10.0.0.1", "10.0.0.2")
    names.now += KEEP_SECONDS - 1
    assert await names.target_with("10.0.0.1") == "ipv4:10.0.0.1:70,10.0.0.2:70"


async def test_an_address_that_is_added_is_called_at_once() -> None:
    names = _Names()
    await names.target_with("10.0.0.3")
    assert await names.target_with("10.0.0.1", "10.0.0.3") == "ipv4:10.0.0.1:70,10.0.0.3:70"


@pytest.mark.parametrize(
    "error", [socket.gaierror("no such name"), TimeoutError(), UnicodeError("label too long")]
)
async def test_without_an_answer_what_is_known_stays_however_long_that_lasts(
    error: Exception,
) -> None:
    names = _Names()
    await names.target_with("10.0.0.1")
    names.error = error
    names.now += 10 * KEEP_SECONDS
    assert await names.target_with() == "ipv4:10.0.0.1:70"


def test_ipv6_addresses_are_in_brackets() -> None:
    assert target_of(["fd00::2", "fd00::1"], 70) == "ipv6:[fd00::1]:70,[fd00::2]:70"


def test_grpc_has_no_lists_of_both_families() -> None:
    assert target_of(["10.0.0.1", "fd00::1"], 70) is None


async def test_the_system_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "127.0.0.1" in await replica_addresses.look_up("localhost")
    with pytest.raises(UnicodeError):
        await replica_addresses.look_up("a" * 64)

    def nobody(*_: object, **__: object) -> list[object]:
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    monkeypatch.setattr(socket, "getaddrinfo", nobody)  # name servers may be slow, or away
    with pytest.raises(socket.gaierror):
        await replica_addresses.look_up("nobody.invalid")


def test_a_look_up_without_an_answer_keeps_no_process_from_ending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = threading.Event()

    def hang(*_: object, **__: object) -> list[object]:
        answers.wait()
        return []

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await replica_addresses.look_up("kvmeta")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    asyncio.run(give_up())
    (looking,) = (thread for thread in threading.enumerate() if thread.name == "look up kvmeta")
    assert looking.daemon
    answers.set()
    looking.join(10)
    assert not looking.is_alive()
