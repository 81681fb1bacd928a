"""Which clients may call a server, by the names in their certificates.

That a certificate is genuine, the handshake has seen to. This is about whose it is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import grpc
import structlog
from grpc_health.v1 import health

from kvloop.errors import PermissionDeniedError
from services.common.rpc_handlers import wrap_handler

_log = structlog.get_logger(__name__)

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]

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


class ClientInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls of clients that are not on the list; health is for everyone.

    Args:
        allowed: names of which a client's certificate must carry one.
    """

    def __init__(self, allowed: frozenset[str]) -> None:
        self._allowed = allowed

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Check the client before the method's handler runs."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(_OPEN_TO_ALL):
            return handler
        return wrap_handler(
            handler,
            lambda inner: self._checked_unary(method, inner),
            lambda inner: self._checked_stream(method, inner),
        )

    def _checked_unary(self, method: str, inner: Any) -> Any:
        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            self._check(method, context)
            return await inner(request, context)

        return call

    def _checked_stream(self, method: str, inner: Any) -> Any:
        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            self._check(method, context)
            async with aclosing(inner(request, context)) as responses:
                async for response in responses:
                    yield response

        return call

    def _check(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        try:
            check_client(client_names(context.auth_context()), self._allowed)
        except PermissionDeniedError as error:
            _log.warning("client_refused", method=method, names=error.metadata["names"])
            raise
