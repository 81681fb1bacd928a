"""A private PostgreSQL server for one test run."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
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

    def admit(self, rules: str) -> None:
        """Let in whom these lines of pg_hba.conf let in; open connections stay."""
        (self._data / "pg_hba.conf").write_text(rules)
        self._run("pg_ctl", "reload")

    def pause(self) -> None:
        """Let it hang: it neither answers nor refuses."""
        self._signal_all(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on where it was paused."""
        self._signal_all(signal.SIGCONT)

    def _signal_all(self, number: signal.Signals) -> None:
        """Send a signal to the server and then to all of its processes.

        The server goes first, so that a paused one starts no more of them.
        """
        server = int((self._data / "postmaster.pid").read_text().split()[0])
        os.kill(server, number)
        for child in Path(f"/proc/{server}/task/{server}/children").read_text().split():
            os.kill(int(child), number)

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._binaries / program), f"--pgdata={self._data}", *arguments]
        if self._user:
            # subprocess's own `user` makes it fork, which gRPC's threads do not survive.
            as_user = [f"--reuid={self._user}", f"--regid={self._user}", "--init-groups"]
            command = ["setpriv", *as_user, *command]
        subprocess.run(
            command,
            check=True,
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
