"""TLS settings that all services share, so that they are named alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from pydantic import model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from kvloop.tls import ClientTlsFiles
from services.common.tls import ServerFiles, ServerTls, log_reading

Clock = Callable[[], float]


class ServerTlsSettings(BaseSettings):
    """How a service's own servers speak TLS."""

    model_config = SettingsConfigDict(use_attribute_docstrings=True)

    tls_certificate_file: Path | None = None
    """PEM file with the certificate chain of this service's servers. Read again when
    it changes. Without it nothing is encrypted."""

    tls_key_file: Path | None = None
    """PEM file with the private key of that certificate."""

    tls_client_ca_file: Path | None = None
    """PEM file with the authorities of client certificates. If set, every client has
    to bring one."""

    @model_validator(mode="after")
    def _server_files_fit(self) -> Self:
        if (self.tls_certificate_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_certificate_file and tls_key_file need each other")
        if self.tls_client_ca_file is not None and self.tls_key_file is None:
            raise ValueError("tls_client_ca_file needs tls_certificate_file and tls_key_file")
        return self

    def server_tls(self, *, clock: Clock = time.monotonic) -> ServerTls | None:
        """The same, ready to use; None: nothing is encrypted.

        Raises:
            OSError: a file cannot be read, or they do not fit together.
        """
        if self.tls_certificate_file is None or self.tls_key_file is None:
            return None
        files = ServerFiles(self.tls_certificate_file, self.tls_key_file, self.tls_client_ca_file)
        return ServerTls(files, allowed_clients=self._allowed_clients(), clock=clock)

    def _allowed_clients(self) -> list[str]:
        return []


class InternalTlsSettings(ServerTlsSettings):
    """The same for a service whose clients are other services."""

    tls_allowed_clients: str = ""
    """Which clients may call, with commas in between: DNS names or URIs of which a
    client's certificate must carry one. Empty: all that tls_client_ca_file admits."""

    @model_validator(mode="after")
    def _allowed_clients_are_known(self) -> Self:
        if self._allowed_clients() and self.tls_client_ca_file is None:
            raise ValueError("tls_allowed_clients needs tls_client_ca_file")
        return self

    def _allowed_clients(self) -> list[str]:
        return [name.strip() for name in self.tls_allowed_clients.split(",") if name.strip()]


class PeerTlsSettings(BaseSettings):
    """How a service speaks TLS with the services that it calls."""

    model_config = SettingsConfigDict(use_attribute_docstrings=True)

    peer_tls_ca_file: Path | None = None
    """PEM file with the authorities of the services that are called. Read again when
    it changes. Without it they are called in plain text."""

    peer_tls_certificate_file: Path | None = None
    """PEM file with the certificate chain to show to them."""

    peer_tls_key_file: Path | None = None
    """PEM file with the private key of that certificate."""

    peer_tls_kvmeta_name: str = ""
    """Name that kvmeta's certificate must carry; empty: the host in --kvmeta."""

    @model_validator(mode="after")
    def _peer_files_fit(self) -> Self:
        if (self.peer_tls_certificate_file is None) != (self.peer_tls_key_file is None):
            raise ValueError("peer_tls_certificate_file and peer_tls_key_file need each other")
        if self.peer_tls_key_file is not None and self.peer_tls_ca_file is None:
            raise ValueError("peer_tls_certificate_file needs peer_tls_ca_file")
        return self

    def peer_tls(self, name: str, *, clock: Clock = time.monotonic) -> ClientTlsFiles | None:
        """How to speak with one kind of service; None: in plain text.

        Args:
            name: that its certificates must carry; empty: the host that is called.
            clock: seconds on a clock that never goes back.

        Raises:
            OSError: a file cannot be read, or they do not fit together.
        """
        if self.peer_tls_ca_file is None:
            return None
        return ClientTlsFiles(
            ca_file=self.peer_tls_ca_file,
            certificate_file=self.peer_tls_certificate_file,
            key_file=self.peer_tls_key_file,
            server_name=name,
            clock=clock,
            on_read=log_reading("peer_certificate", self.peer_tls_ca_file),
        )
