"""API keys: which credential speaks for which tenant.

Keys are known by their SHA-256 digest only. A key ring is a text of lines

    <tenant> <sha256 of the key, 64 hex digits>

in which empty lines and lines that start with `#` mean nothing. A tenant may
have several keys, so that one can be replaced by another without a gap.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import structlog

from kvloop.errors import UnauthenticatedError
from kvloop.file_value import FileValue
from services.router.deadline import Clock
from services.router.identity import ANYONE, Caller

_log = structlog.get_logger(__name__)
_LINE = re.compile(r"^(?P<tenant>\S{1,128})\s+(?P<digest>[0-9a-fA-F]{64})$")


@dataclass(frozen=True)
class KeyRing:
    """Digests of keys with their tenants."""

    entries: Sequence[tuple[bytes, str]]

    def tenant_of(self, key: str) -> str | None:
        """The key's tenant, or None. Takes as long for a wrong key as for a right one."""
        digest = hashlib.sha256(key.encode(errors="surrogateescape")).digest()
        found = None
        for known, tenant in self.entries:
            if hmac.compare_digest(known, digest):
                found = tenant
        return found


class BadKeysError(ValueError):
    """A text is no key ring."""


def parse_keys(text: str) -> KeyRing:
    """The key ring that a text describes.

    Raises:
        BadKeysError: a line is not well formed, or a key belongs to two tenants.
            The message names the line's number and not its content.
    """
    tenants: dict[bytes, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.match(line)
        if match is None:
            raise BadKeysError(f"line {number} of the API keys is not 'TENANT SHA256'")
        digest = bytes.fromhex(match["digest"])
        if tenants.setdefault(digest, match["tenant"]) != match["tenant"]:
            raise BadKeysError(f"line {number} of the API keys gives a key to a second tenant")
    return KeyRing(list(tenants.items()))


def key_lines(setting: str) -> str:
    """The text of a key ring that was given with commas in place of line ends."""
    return setting.replace(",", "\n")


class Authenticator(Protocol):
    """Tells who is asking."""

    def caller(self, authorization: str | None) -> Caller:
        """The caller that an Authorization header or metadata value speaks for.

        Raises:
            UnauthenticatedError: there is none, or its key is not known.
        """
        ...

    def reload(self) -> None:
        """Read again what is known of keys."""
        ...


class OpenDoor:
    """Lets everyone in as one tenant. See `Authenticator`."""

    def caller(self, authorization: str | None) -> Caller:
        """See `Authenticator.caller`. Whatever key a client sends is ignored."""
        return ANYONE

    def reload(self) -> None:
        """See `Authenticator.reload`. There is nothing to read."""


class KeyFile:
    """Knows keys from a file, which is read again when it changes. See `Authenticator`.

    A file that cannot be read any more, or is not well formed, changes nothing:
    the keys of before stay valid, and the log says so.

    Args:
        path: the file.
        more: further keys, that do not change.
        isolated: whether engines keep the tenants' KV apart.
        clock: paces how often the file is looked at.

    Raises:
        OSError: the file cannot be read.
        BadKeysError: it is not well formed.
    """

    def __init__(self, path: Path | None, more: KeyRing, *, isolated: bool, clock: Clock) -> None:
        self._path = path
        self._more = more
        self._isolated = isolated
        paths = [path] if path is not None else []
        self._ring = FileValue(paths, self._read, clock=clock, on_read=self._log_reading)

    def reload(self) -> None:
        """See `Authenticator.reload`. The file may look unchanged."""
        self._ring.reload()

    def caller(self, authorization: str | None) -> Caller:
        """See `Authenticator.caller`."""
        scheme, _, key = (authorization or "").strip().partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise UnauthenticatedError(
                "no API key was sent; send it as 'Authorization: Bearer KEY'",
                reason="API_KEY_MISSING",
            )
        tenant = self._ring.current().tenant_of(key.strip())
        if tenant is None:
            raise UnauthenticatedError("the API key is not valid", reason="API_KEY_INVALID")
        return Caller(tenant, self._isolated)

    @staticmethod
    def _log_reading(error: Exception | None) -> None:
        if error is None:
            _log.info("api_keys_reloaded")
        else:
            _log.error("api_keys_not_reloaded", error=str(error))

    def _read(self) -> KeyRing:
        if self._path is None:
            return self._more
        read = parse_keys(self._path.read_text(encoding="utf-8"))
        return KeyRing([*read.entries, *self._more.entries])
