"""A private PostgreSQL server for one test run."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_DEBIAN = Path("/usr/lib/postgresql")
_ACCOUNT = "postgres"


def find_binaries() -> Path | None:
    """Where initdb and pg_ctl are: Debian's newest, or those on PATH."""
    installed = sorted(
        (path.parent for path in _DEBIAN.glob("*/bin/initdb")),
        key=lambda path: int(path.parent.name),
    )
    if installed:
        return installed[-1]
    found = shutil.which("initdb")
    return Path(found).resolve().parent if found else None


class PostgresServer:
    """A server in a directory of its own, reached by a Unix socket there.

    Args:
        binaries: where initdb and pg_ctl are.
        directory: an empty directory.
        durable: wait for the disk at each commit; tests have no need to.
    """

    def __init__(self, binaries: Path, directory: Path, *, durable: bool) -> None:
        self._durable = durable
        self._binaries = binaries
        self._directory = directory
        self._data = directory / "data"
        # The server refuses to run as root.
        self._user = _ACCOUNT if os.geteuid() == 0 else None
        if self._user:
            account = pwd.getpwnam(self._user)
            os.chown(directory, account.pw_uid, account.pw_gid)

    @property
    def url(self) -> str:
        """SQLAlchemy URL of the server's database."""
        return f"postgresql://kvloop@/postgres?host={self._directory}"

    def create(self) -> None:
        """Make an empty cluster."""
        self._run("initdb", "--auth=trust", "--username=kvloop", "--encoding=UTF8", "--no-sync")

    def start(self) -> None:
        """Start the server and wait until it answers."""
        options = (
            f"-c listen_addresses= -c unix_socket_directories={self._directory} "
            f"-c fsync={'on' if self._durable else 'off'} -c max_connections=64"
        )
        log = self._directory / "log"
        self._run("pg_ctl", "start", "--wait", f"--log={log}", f"--options={options}")

    def stop(self, mode: str = "fast") -> None:
        """Stop the server; mode `immediate` is a crash."""
        self._run("pg_ctl", "stop", "--wait", f"--mode={mode}")

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._binaries / program), f"--pgdata={self._data}", *arguments]
        subprocess.run(
            command,
            check=True,
            user=self._user,
            cwd=self._directory,
            # pg_ctl's server would keep a pipe open.
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


@contextmanager
def private_server(*, durable: bool = False) -> Iterator[PostgresServer | None]:
    """A running server that is removed at the end; None if none is installed."""
    binaries = find_binaries()
    if binaries is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="kvloop-pg-") as name:
        server = PostgresServer(binaries, Path(name), durable=durable)
        server.create()
        server.start()
        try:
            yield server
        finally:
            server.stop("immediate")
