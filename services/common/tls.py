"""TLS for servers, with certificates that are replaced while they serve.

Certificates live in files, which are read again when they change: connections
that exist go on, new ones get the new certificate.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import grpc
import structlog

from kvloop.file_value import FileValue

_log = structlog.get_logger(__name__)


def log_reading(what: str, path: Path) -> Callable[[Exception | None], None]:
    """Logs how the reading of files went that have changed.

    Args:
        what: begins the event's name: `<what>_reloaded` or `<what>_not_reloaded`.
        path: one of the files.
    """

    def log(error: Exception | None) -> None:
        if error is None:
            _log.info(f"{what}_reloaded", path=str(path))
        else:
            _log.error(f"{what}_not_reloaded", path=str(path), error=str(error))

    return log


@dataclass(frozen=True)
class ServerFiles:
    """Where a server's certificate lies. All files are PEM."""

    certificate: Path
    """Its chain, the server's own first."""
    key: Path
    """Its private key."""
    client_authority: Path | None = None
    """Authority of the certificates that clients must bring; none: they need none."""

    @property
    def paths(self) -> list[Path]:
        """All of them."""
        files = (self.certificate, self.key, self.client_authority)
        return [path for path in files if path is not None]

    def context(self) -> ssl.SSLContext:
        """The files as they are now, for `ssl`.

        Raises:
            OSError: a file cannot be read, or they do not fit together.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self.certificate, self.key)
        if self.client_authority is not None:
            context.load_verify_locations(self.client_authority)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        """The files as they are now, for gRPC, which takes any.

        Raises:
            OSError: a file cannot be read.
        """
        authority = self.client_authority
        return grpc.ssl_server_certificate_configuration(
            [(self.key.read_bytes(), self.certificate.read_bytes())],
            root_certificates=authority.read_bytes() if authority is not None else None,
        )


class ServerTls:
    """A server's side of TLS, for gRPC and for `ssl`.

    Args:
        files: the certificate.
        allowed_clients: names in client certificates that may call; empty: any.
        clock: seconds on a clock that never goes back.

    Raises:
        OSError: a file cannot be read, or they do not fit together.
    """

    def __init__(
        self,
        files: ServerFiles,
        *,
        allowed_clients: Collection[str] = (),
        clock: Callable[[], float],
    ) -> None:
        self._files = files
        self.allowed_clients = frozenset(allowed_clients)
        """Names in client certificates that may call; empty: any."""
        self._value = FileValue(
            files.paths,
            # First what checks that certificate and key belong together.
            lambda: (files.context(), files.configuration()),
            clock=clock,
            on_read=log_reading("certificate", files.certificate),
        )

    @property
    def certificate(self) -> Path:
        """Where the certificate lies."""
        return self._files.certificate

    def reload(self) -> None:
        """Read the files now, even if they look unchanged."""
        self._value.reload()

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """For a gRPC server, which asks again at every handshake."""
        _, configuration = self._value.current()
        return grpc.dynamic_ssl_server_credentials(
            configuration,
            lambda: self._value.current()[1],
            require_client_authentication=self._files.client_authority is not None,
        )

    def ssl_context(self) -> ssl.SSLContext:
        """For any other server. It hands each handshake over to the current context."""
        entrance = self._files.context()

        def choose(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
            connection.context, _configuration = self._value.current()

        entrance.sni_callback = choose
        return entrance
