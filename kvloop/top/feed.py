"""Reads the feed of the router's status page."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import msgspec

from kvloop.errors import InvalidFieldError, UnauthenticatedError, UnavailableError
from kvloop.tls import TlsSource

Parts = dict[str, Any]
"""The parts of the page by name, as the router's feed sends them: turns, figures,
workers, conversations, ledger."""

_TIMEOUT_SECONDS = 15.0
"""The router says something every few seconds, if only that nothing is new."""


def looks(url: str, *, api_key: str = "", tls: TlsSource | None = None) -> Iterator[Parts]:
    """All parts, each time that one or several have changed.

    Args:
        url: of the router's gateway, such as http://127.0.0.1:8000.
        api_key: for a router that asks for one.
        tls: whom to trust, and which certificate to show.

    Raises:
        UnavailableError: the router cannot be reached, or has gone.
        UnauthenticatedError: the key is missing or wrong.
        InvalidFieldError: the URL is none, or leads to something else.
    """
    with closing(_connect(url, tls)) as connection:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            connection.request(
                "GET", urlsplit(url).path.rstrip("/") + "/ui/events", headers=headers
            )
            reply = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise UnavailableError(f"{url} does not answer: {error}") from error
        if reply.status == 401:
            raise UnauthenticatedError("the router asks for an API key; set KVLOOP_API_KEY")
        if reply.status != 200:
            raise InvalidFieldError(
                f"{url} has no status page: it answers {reply.status}", field="--gateway"
            )
        parts: Parts = {}
        try:
            for changed in read_looks(reply):
                parts = parts | changed
                yield parts
        except (OSError, http.client.HTTPException) as error:
            raise UnavailableError(f"{url} has gone: {error}") from error
        raise UnavailableError(f"{url} has ended the feed")


def read_looks(lines: Iterable[bytes]) -> Iterator[Parts]:
    """What each look brought. A look ends with the part `ledger`, or with a comment.

    Args:
        lines: of a stream of server-sent events.
    """
    changed: Parts = {}
    name = ""
    for line in lines:
        if line.startswith(b"event: "):
            name = line[7:].strip().decode()
        elif line.startswith(b"data: "):
            changed[name] = msgspec.json.decode(line[6:])
        elif line.startswith(b":") or (not line.strip() and name == "ledger"):
            if changed:
                yield changed
            changed, name = {}, ""


def _connect(url: str, tls: TlsSource | None) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidFieldError(f"{url!r}: {error}", field="--gateway") from error
    if parts.scheme not in ("http", "https") or not host:
        raise InvalidFieldError(
            f"{url!r} is no URL such as http://127.0.0.1:8000", field="--gateway"
        )
    if parts.scheme == "http":
        return http.client.HTTPConnection(host, port, timeout=_TIMEOUT_SECONDS)
    return http.client.HTTPSConnection(host, port, timeout=_TIMEOUT_SECONDS, context=_context(tls))


def _context(tls: TlsSource | None) -> ssl.SSLContext:
    roots = tls.current().root_certificates if tls is not None else None
    return ssl.create_default_context(cadata=roots.decode() if roots else None)
