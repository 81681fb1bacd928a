"""A throw-away authority with one certificate for each part of a stack.

Made with the command `openssl` (1.1.1 or newer), which nearly every machine has,
so that the client library needs no cryptography of its own. docs/tls.md shows the
same commands for people who make their own.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kvloop.errors import UnsupportedError
from kvloop.tls import ClientTlsFiles

_DAYS = "365"
_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-sha256", "-keyout")
_SETTINGS = """\
[req]
distinguished_name = name
prompt = no
[name]
CN = {name}
[authority]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[part]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth, clientAuth
subjectAltName = DNS:{name}, DNS:localhost, IP:127.0.0.1, IP:::1
"""


class Part(StrEnum):
    """Who has a certificate."""

    KVMETA = "kvmeta"
    ROUTER = "router"
    WORKER = "worker"
    OPERATOR = "operator"
    """People, and the supervisor."""

    @property
    def dns_name(self) -> str:
        """Name in the certificate, by which others recognise it."""
        return f"{self.value}.kvloop"


@dataclass(frozen=True, slots=True)
class StackCertificates:
    """Where the certificates of a stack lie. `make_certificates` makes them.

    Attributes:
        folder: of all files.
    """

    folder: Path

    @property
    def authority(self) -> Path:
        """Certificate of the authority, which all parts trust."""
        return self.folder / "ca.pem"

    def certificate(self, part: Part) -> Path:
        """A part's certificate."""
        return self.folder / f"{part}.pem"

    def key(self, part: Part) -> Path:
        """Its private key."""
        return self.folder / f"{part}.key"

    def client_tls(self) -> ClientTlsFiles:
        """How people and the supervisor call the stack's services."""
        return ClientTlsFiles(
            ca_file=self.authority,
            certificate_file=self.certificate(Part.OPERATOR),
            key_file=self.key(Part.OPERATOR),
        )

    def serving_flags(self, part: Part, allowed: Sequence[Part] = ()) -> tuple[str, ...]:
        """Flags that make a part's servers speak mutual TLS.

        Args:
            part: whose servers.
            allowed: parts that may call it; empty: all.
        """
        flags = (
            f"--tls-certificate-file={self.certificate(part)}",
            f"--tls-key-file={self.key(part)}",
            f"--tls-client-ca-file={self.authority}",
        )
        if not allowed:
            return flags
        return (*flags, f"--tls-allowed-clients={','.join(part.dns_name for part in allowed)}")

    def calling_flags(self, part: Part) -> tuple[str, ...]:
        """Flags that make a part speak mutual TLS with those that it calls."""
        return (
            f"--peer-tls-ca-file={self.authority}",
            f"--peer-tls-certificate-file={self.certificate(part)}",
            f"--peer-tls-key-file={self.key(part)}",
            f"--peer-tls-kvmeta-name={Part.KVMETA.dns_name}",
        )


def make_certificates(folder: Path) -> StackCertificates:
    """Make an authority and one certificate for each part.

    The authority's key is gone at the end: nobody can make another certificate.

    Args:
        folder: is made, for this user alone.

    Raises:
        UnsupportedError: there is no `openssl`, or it does not do what it should.
    """
    if shutil.which("openssl") is None:
        raise UnsupportedError("certificates are made with the command openssl, which is not here")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = StackCertificates(folder)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        work = Path(name)
        authority_key = work / "ca.key"
        settings = _write_settings(work, "kvloop throw-away authority")
        _openssl("req", "-x509", "-days", _DAYS, "-config", settings, "-extensions", "authority",
                 *_NEW_KEY, authority_key, "-out", made.authority)  # fmt: skip
        for part in Part:
            settings = _write_settings(work, part.dns_name)
            request = work / "request.pem"
            _openssl("req", "-new", "-config", settings, *_NEW_KEY, made.key(part),
                     "-out", request)  # fmt: skip
            _openssl("x509", "-req", "-in", request, "-days", _DAYS, "-sha256",
                     "-CA", made.authority, "-CAkey", authority_key, "-CAcreateserial",
                     "-CAserial", work / "serial", "-extfile", settings, "-extensions", "part",
                     "-out", made.certificate(part))  # fmt: skip
    return made


def _write_settings(work: Path, name: str) -> Path:
    settings = work / "openssl.cnf"
    settings.write_text(_SETTINGS.format(name=name), encoding="utf-8")
    return settings


def _openssl(*arguments: str | Path) -> None:
    done = subprocess.run(
        ["openssl", *map(str, arguments)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise UnsupportedError(f"openssl failed: {done.stderr.strip()}")
