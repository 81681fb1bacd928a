"""Certificates for tests, in files as people have them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import trustme

from kvloop.tls import ClientTlsFiles
from services.common.tls import ServerFiles

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class Identity:
    """Where one part's certificate and key lie."""

    certificate: Path
    key: Path


class Authority:
    """Issues certificates.

    Args:
        folder: for all files.
        name: of the file with the authority's own certificate.
    """

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self.folder = folder
        self.file = folder / f"{name}.pem"
        self._ca = trustme.CA()
        self.file.write_bytes(self.pem)

    @property
    def pem(self) -> bytes:
        """Its own certificate."""
        return self._ca.cert_pem.bytes()

    def issue(self, part: str, *names: str, expired: bool = False) -> Identity:
        """A certificate for a part, in the place of the one before.

        Args:
            part: whose; it carries the name `<part>.kvloop`.
            names: further names and addresses; by default those of this machine.
            expired: it was valid until yesterday.
        """
        now = datetime.now(UTC)
        until = now + timedelta(days=-1 if expired else 1)
        made = self._ca.issue_cert(
            f"{part}.kvloop",
            *(names or LOOPBACK),
            not_before=now - timedelta(days=2),
            not_after=until,
        )
        found = Identity(self.folder / f"{part}.pem", self.folder / f"{part}.key")
        found.key.write_bytes(made.private_key_pem.bytes())
        found.certificate.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
        return found

    def server(self, identity: Identity) -> ServerFiles:
        """Mutual TLS for a server."""
        return ServerFiles(identity.certificate, identity.key, self.file)

    def client(self, identity: Identity | None, **more: Any) -> ClientTlsFiles:
        """TLS for a client; mutual if it has an identity."""
        return ClientTlsFiles(
            ca_file=self.file,
            certificate_file=identity.certificate if identity else None,
            key_file=identity.key if identity else None,
            **more,
        )

    def serving(self, identity: Identity, allowed: str = "") -> dict[str, Any]:
        """Settings of a service that is called with mutual TLS."""
        return {
            "tls_certificate_file": identity.certificate,
            "tls_key_file": identity.key,
            "tls_client_ca_file": self.file,
            **({"tls_allowed_clients": allowed} if allowed else {}),
        }

    def calling(self, identity: Identity) -> dict[str, Any]:
        """Settings of a service that calls others with mutual TLS."""
        return {
            "peer_tls_ca_file": self.file,
            "peer_tls_certificate_file": identity.certificate,
            "peer_tls_key_file": identity.key,
            "peer_tls_kvmeta_name": "kvmeta.kvloop",
        }
