"""The client's side of TLS: whom it trusts, who it is, and from which files."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import grpc

from kvloop.file_value import FileValue


@dataclass(frozen=True, slots=True)
class ClientTls:
    """How a client speaks TLS. Certificates and keys are PEM.

    Attributes:
        root_certificates: authorities to trust; by default those of gRPC.
        certificate_chain: the client's own certificate, for mutual TLS.
        private_key: key of that certificate.
        server_name: name that the server's certificate must carry; by default the
            host that is called.
    """

    root_certificates: bytes | None = None
    certificate_chain: bytes | None = None
    private_key: bytes | None = None
    server_name: str = ""

    def credentials(self) -> grpc.ChannelCredentials:
        """The same for gRPC."""
        return grpc.ssl_channel_credentials(
            self.root_certificates, self.private_key, self.certificate_chain
        )

    def options(self) -> list[tuple[str, int | str]]:
        """Channel options that go with the credentials."""
        return [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []

    def current(self) -> ClientTls:
        """See `TlsSource`: never anything else."""
        return self


class TlsSource(Protocol):
    """Says how to speak TLS on connections that are opened now."""

    def current(self) -> ClientTls:
        """The same object until something has changed."""
        ...


class ClientTlsFiles:
    """A client's TLS from PEM files, which may be replaced at any time.

    Calls that are made after a change go over a new connection; calls that run
    keep theirs. See `TlsSource`.

    Args:
        ca_file: authorities to trust; those of gRPC if omitted.
        certificate_file: the client's own certificate, for mutual TLS.
        key_file: key of that certificate.
        server_name: name that the server's certificate must carry; by default the
            host that is called.
        clock: seconds on a clock that never goes back.
        on_read: told how each later reading went: None, or what was wrong.

    Raises:
        OSError: a file cannot be read, or they do not fit together.
        ValueError: a certificate without a key, or a key without a certificate.
    """

    def __init__(
        self,
        *,
        ca_file: Path | None = None,
        certificate_file: Path | None = None,
        key_file: Path | None = None,
        server_name: str = "",
        clock: Callable[[], float] = time.monotonic,
        on_read: Callable[[Exception | None], None] | None = None,
    ) -> None:
        if (certificate_file is None) != (key_file is None):
            raise ValueError("a client certificate and its key need each other")
        self._ca_file = ca_file
        self._certificate_file = certificate_file
        self._key_file = key_file
        self._server_name = server_name
        paths = [path for path in (ca_file, certificate_file, key_file) if path is not None]
        more = {} if on_read is None else {"on_read": on_read}
        self._value = FileValue(paths, self._read, clock=clock, **more)

    def current(self) -> ClientTls:
        """See `TlsSource`: what the files said a second ago, at the latest."""
        return self._value.current()

    def reload(self) -> None:
        """Read the files now, even if they look unchanged."""
        self._value.reload()

    def _read(self) -> ClientTls:
        # gRPC takes anything and fails at the handshake; `ssl` checks beforehand.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if self._ca_file is not None:
            context.load_verify_locations(self._ca_file)
        if self._certificate_file is not None:
            context.load_cert_chain(self._certificate_file, self._key_file)
        return ClientTls(
            root_certificates=_bytes(self._ca_file),
            certificate_chain=_bytes(self._certificate_file),
            private_key=_bytes(self._key_file),
            server_name=self._server_name,
        )


def tls_from_environment(environment: Mapping[str, str]) -> ClientTlsFiles | None:
    """What $KVLOOP_TLS_CA_FILE and its relatives say; None: plain text.

    They are those of the command `kvloop`, and its options have the same names.

    Raises:
        OSError, ValueError: as for `ClientTlsFiles`.
    """

    def path(variable: str) -> Path | None:
        value = environment.get(variable)
        return Path(value) if value else None

    files = [path(f"KVLOOP_TLS_{name}_FILE") for name in ("CA", "CERTIFICATE", "KEY")]
    if files == [None, None, None]:
        return None
    ca_file, certificate_file, key_file = files
    return ClientTlsFiles(
        ca_file=ca_file,
        certificate_file=certificate_file,
        key_file=key_file,
        server_name=environment.get("KVLOOP_TLS_SERVER_NAME", ""),
    )


def _bytes(path: Path | None) -> bytes | None:
    return None if path is None else path.read_bytes()
