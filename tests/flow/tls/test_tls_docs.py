"""The commands of docs/tls.md do what the page says."""

from __future__ import annotations

import asyncio
import re
import subprocess
from pathlib import Path

import pytest
from pydantic_settings import BaseSettings, CliApp

from kvloop import rpc
from kvloop.tls import ClientTlsFiles
from services.common.tls import ServerFiles, ServerTls
from services.kvmeta.settings import KvmetaSettings
from services.router.settings import RouterSettings
from services.worker.settings import WorkerSettings
from tests.flow.tls import echo

PAGE = Path(__file__).parents[3] / "docs" / "tls.md"
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)
KINDS: dict[str, type[BaseSettings]] = {
    "services.kvmeta": KvmetaSettings,
    "services.worker": WorkerSettings,
    "services.router": RouterSettings,
}


def _run(commands: str, folder: Path) -> None:
    subprocess.run(["bash", "-euc", commands], cwd=folder, check=True, capture_output=True)


async def test_certificates_made_as_shown_serve_one_name_for_all_workers(tmp_path: Path) -> None:
    await asyncio.to_thread(_run, BLOCKS[0], tmp_path)
    files = ServerFiles(tmp_path / "worker.pem", tmp_path / "worker.key", tmp_path / "ca.pem")
    clock = asyncio.get_running_loop().time
    tls = ClientTlsFiles(
        ca_file=tmp_path / "ca.pem",
        certificate_file=tmp_path / "router.pem",
        key_file=tmp_path / "router.key",
        server_name="worker.kvloop",
    )
    async with (
        echo.serve(ServerTls(files, allowed_clients=["router.kvloop"], clock=clock)) as server,
        rpc.open_channel(f"127.0.0.1:{server.port}", tls) as channel,
    ):
        assert await echo.who(channel) == "router.kvloop,service.kvloop"


@pytest.mark.parametrize("service", KINDS)
def test_services_take_the_flags_that_are_shown(service: str) -> None:
    lines = BLOCKS[1].replace("\\\n", "").splitlines()
    (words,) = [line.split() for line in lines if f"-m {service} " in line]
    more = ["--model", "m"] if service == "services.worker" else []
    settings = CliApp.run(KINDS[service], cli_args=[*words[3:], *more])
    assert settings.model_dump()["tls_certificate_file"] is not None
