"""The replicas behind a name show certificates for that name, whatever their addresses."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path

import grpc
import pytest

from services.common.replicated_channel import open_replicated_channel
from services.common.tls import ServerTls
from tests.flow.tls import echo
from tests.flow.tls.authority import Authority


async def _loopback(host: str) -> Collection[str]:
    return ["127.0.0.1"]


@pytest.mark.parametrize(
    ("host", "server_name", "answers"),
    [
        ("kvmeta.example", "", True),
        ("other.example", "", False),
        ("other.example", "kvmeta.example", True),
        ("kvmeta.example", "other.example", False),
    ],
)
async def test_the_name_is_checked_and_not_the_address(
    tmp_path: Path, host: str, server_name: str, answers: bool
) -> None:
    authority = Authority(tmp_path)
    files = authority.server(authority.issue("server", "kvmeta.example"))
    tls = authority.client(authority.issue("router"), server_name=server_name)
    async with (
        echo.serve(ServerTls(files, clock=time.monotonic)) as server,
        open_replicated_channel(f"{host}:{server.port}", tls, look_up=_loopback) as channel,
    ):
        if answers:
            assert "router.kvloop" in await echo.who(channel)
        else:
            with pytest.raises(grpc.aio.AioRpcError, match="Hostname Verification Check failed"):
                await echo.who(channel)
