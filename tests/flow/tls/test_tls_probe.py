"""The probe of container health checks, against servers with and without TLS."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from services.common import probe
from services.common.tls import ServerTls
from tests.flow.tls import echo
from tests.flow.tls.authority import Authority


async def test_the_probe_speaks_tls_by_the_variables_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    files = authority.server(authority.issue("worker", "elsewhere.example"))
    me = authority.issue("probe")
    tls = ServerTls(files, allowed_clients=["router.kvloop"], clock=asyncio.get_running_loop().time)
    async with echo.serve(tls) as server:
        arguments = [f"127.0.0.1:{server.port}", "--timeout-seconds", "1"]
        assert await asyncio.to_thread(probe.main, arguments) == 1
        monkeypatch.setenv("KVLOOP_TLS_CA_FILE", str(authority.file))
        monkeypatch.setenv("KVLOOP_TLS_CERTIFICATE_FILE", str(me.certificate))
        monkeypatch.setenv("KVLOOP_TLS_KEY_FILE", str(me.key))
        monkeypatch.setenv("KVLOOP_TLS_SERVER_NAME", "worker.kvloop")
        arguments[-1] = "20"
        assert await asyncio.to_thread(probe.main, arguments) == 0


def test_the_probe_says_which_file_is_at_fault(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "services.common.probe", "127.0.0.1:1"],
        env={"KVLOOP_TLS_CA_FILE": str(tmp_path / "none.pem")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "none.pem" in done.stderr or "No such file" in done.stderr
