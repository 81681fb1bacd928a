"""Which key speaks for which tenant, and what becomes of its prefix cache."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from kvloop.errors import UnauthenticatedError
from services.router.identity import ANYONE, Caller
from services.router.keys import BadKeysError, KeyFile, KeyRing, OpenDoor, key_lines, parse_keys


def _line(tenant: str, key: str) -> str:
    return f"{tenant} {hashlib.sha256(key.encode()).hexdigest()}"


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _file(path: Path, clock: _Clock, *, isolated: bool = True) -> KeyFile:
    return KeyFile(path, KeyRing([]), isolated=isolated, clock=clock)


def test_a_ring_knows_keys_by_their_digest() -> None:
    text = f"# people\n\n{_line('a', 'k1')}\n  {_line('a', 'k2').upper().replace('A ', 'a ')}\n"
    ring = parse_keys(text + _line("b", "ключ"))
    assert [ring.tenant_of(key) for key in ("k1", "k2", "ключ", "k3", "")] == [
        "a",
        "a",
        "b",
        None,
        None,
    ]


def test_a_setting_may_hold_several_lines() -> None:
    ring = parse_keys(key_lines(f"{_line('a', 'k1')},{_line('b', 'k2')}"))
    assert (ring.tenant_of("k1"), ring.tenant_of("k2")) == ("a", "b")


@pytest.mark.parametrize(
    "text",
    ["a", "a b", f"{'x' * 129} {'0' * 64}", f"a {'0' * 63}", f"a {'0' * 64}\nb {'0' * 64}"],
)
def test_what_is_no_key_ring_is_refused_without_being_shown(text: str) -> None:
    with pytest.raises(BadKeysError) as caught:
        parse_keys(text)
    assert "line" in str(caught.value)
    assert "0" * 10 not in str(caught.value)


def test_callers_have_the_tenant_of_their_key(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(_line("a", "k1"))
    keys = _file(path, _Clock())
    assert keys.caller("Bearer k1") == Caller("a", isolated=True)
    assert keys.caller("bearer  k1 ").tenant == "a"
    for wrong in (None, "", "Bearer", "Bearer ", "Basic k1", "k1", "Bearer k2", "Bearer \udcff"):
        with pytest.raises(UnauthenticatedError) as caught:
            keys.caller(wrong)
        assert "k2" not in caught.value.message


def test_the_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys", _Clock()
    path.write_text(_line("a", "k1"))
    keys = _file(path, clock)
    path.write_text(_line("bb", "k2"))
    keys.caller("Bearer k1")  # not looked at yet
    clock.now = 1
    assert keys.caller("Bearer k2").tenant == "bb"
    with pytest.raises(UnauthenticatedError):
        keys.caller("Bearer k1")


def test_a_file_that_breaks_leaves_the_keys_as_they_were(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys", _Clock()
    path.write_text(_line("a", "k1"))
    keys = _file(path, clock)
    path.write_text("nonsense")
    clock.now = 1
    assert keys.caller("Bearer k1").tenant == "a"
    os.unlink(path)
    clock.now = 2
    assert keys.caller("Bearer k1").tenant == "a"
    path.write_text(_line("b", "k1"))
    clock.now = 3
    assert keys.caller("Bearer k1").tenant == "b"


def test_without_keys_everyone_is_the_one_tenant() -> None:
    assert OpenDoor().caller("Bearer whatever") == OpenDoor().caller(None) == ANYONE


def test_salts_are_those_of_the_caller_where_there_is_one_tenant() -> None:
    assert (ANYONE.cache_salt(None), ANYONE.cache_salt("x")) == (None, "x")


def test_no_salt_of_one_tenant_is_that_of_another() -> None:
    callers = [Caller(tenant, isolated=True) for tenant in ("a", "a\0b", "a\\0b", "b")]
    salts = [caller.cache_salt(own) for caller in callers for own in (None, "", "b", "\0b", "a")]
    assert len(set(salts)) == len(salts)
