"""TLS for servers, with certificates that are replaced while they serve.

Certificates live in files. Before a handshake the files are looked at, at most
once a second, and read again if one has changed: connections that exist go on,
new ones get the new certificate. Files that do not fit together, as in the
middle of a rotation, change nothing until they do.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import structlog

_log = structlog.get_logger(__name__)
_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class ServerFiles:
    """Where a server's certificate lies. All files are PEM."""

    certificate: Path
    """Its chain, the server's own first."""
    key: Path
    """Its private key."""
    client_authority: Path | None = None
    """Authority of the certificates that clients must bring; none: they need none."""

    def context(self) -> ssl.SSLContext:
        """The files as they are now.

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

    def stamp(self) -> tuple[tuple[int, int, int], ...]:
        """Changes whenever a file is written or replaced."""
        files = (self.certificate, self.key, self.client_authority)
        found = [os.stat(path) for path in files if path is not None]
        return tuple((one.st_mtime_ns, one.st_size, one.st_ino) for one in found)


class ServerTls:
    """A server's side of TLS, for gRPC and for `ssl`.

    Args:
        files: the certificate.
        clock: seconds on a clock that never goes back.

    Raises:
        OSError: a file cannot be read, or they do not fit together.
    """

    def __init__(self, files: ServerFiles, *, clock: Callable[[], float]) -> None:
        self._files = files
        self._clock = clock
        self._stamp = files.stamp()
        self._looked_at = clock()
        self._context = files.context()
        self._pem = self._configuration()

    @property
    def certificate(self) -> Path:
        """Where the certificate lies."""
        return self._files.certificate

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """For a gRPC server, which asks again at every handshake."""
        return grpc.dynamic_ssl_server_credentials(
            self._pem,
            self._current_pem,
            require_client_authentication=self._files.client_authority is not None,
        )

    def ssl_context(self) -> ssl.SSLContext:
        """For any other server. It hands each handshake over to the current context."""
        entrance = self._files.context()

        def choose(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
            self._refresh()
            connection.context = self._context

        entrance.sni_callback = choose
        return entrance

    def _current_pem(self) -> grpc.ServerCertificateConfiguration:
        self._refresh()
        return self._pem

    def _refresh(self) -> None:
        now = self._clock()
        if now - self._looked_at < _LOOK_SECONDS:
            return
        self._looked_at = now
        try:
            stamp = self._files.stamp()
            if stamp == self._stamp:
                return
            # First what checks that certificate and key belong together.
            context, pem = self._files.context(), self._configuration()
        except OSError as error:
            _log.error("certificate_not_reloaded", error=str(error))
            return
        self._context, self._pem, self._stamp = context, pem, stamp
        _log.info("certificate_reloaded", path=str(self._files.certificate))

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        authority = self._files.client_authority
        return grpc.ssl_server_certificate_configuration(
            [(self._files.key.read_bytes(), self._files.certificate.read_bytes())],
            root_certificates=authority.read_bytes() if authority is not None else None,
        )
