"""Which clients may call a server, by the names in their certificates.

That a certificate is genuine, the handshake has seen to. This is about whose it is.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager

import structlog
from grpc_health.v1 import health

from kvloop.errors import PermissionDeniedError
from services.common.rpc_handlers import Around, AroundMethod, Context

_log = structlog.get_logger(__name__)

_NAMES = ("peer_dns", "peer_uri")
_OPEN_TO_ALL = f"/{health.SERVICE_NAME}/"


def client_names(auth_context: Mapping[str, Iterable[bytes]]) -> frozenset[str]:
    """DNS names and URIs in the certificate of a call's client."""
    return frozenset(
        name.decode(errors="replace") for key in _NAMES for name in auth_context.get(key, ())
    )


def check_client(names: frozenset[str], allowed: frozenset[str]) -> None:
    """Let a client pass that has one of the names.

    Raises:
        PermissionDeniedError: CLIENT_NOT_ALLOWED; it has none of them.
    """
    if names & allowed:
        return
    shown = ", ".join(sorted(names)) or "none"
    raise PermissionDeniedError(
        f"this client may not call here: the names in its certificate are {shown}, and none of "
        "them is among tls_allowed_clients",
        reason="CLIENT_NOT_ALLOWED",
        names=shown,
    )


def only_clients(allowed: frozenset[str]) -> AroundMethod:
    """Refuses calls of clients that are not on the list; health is for everyone.

    Args:
        allowed: names of which a client's certificate must carry one.
    """

    def of_method(method: str) -> Around | None:
        if method.startswith(_OPEN_TO_ALL):
            return None

        @asynccontextmanager
        async def around(context: Context, request: object) -> AsyncIterator[None]:
            try:
                check_client(client_names(context.auth_context()), allowed)
            except PermissionDeniedError as error:
                _log.warning("client_refused", method=method, names=error.metadata["names"])
                raise
            yield

        return around

    return of_method
