"""The probe of container health checks."""

from __future__ import annotations

import asyncio

import pytest

from kvloop.kvmeta.v1 import ledger_pb2
from services.common import probe, rpc_server

_SERVICE = ledger_pb2.DESCRIPTOR.services_by_name["LedgerService"]


async def test_it_asks_for_the_server_or_for_a_service_and_says_which_is_not_well(
    capsys: pytest.CaptureFixture[str],
) -> None:
    drain = rpc_server.Drain()
    async with rpc_server.serve(
        "127.0.0.1:0", lambda _: None, [_SERVICE], grace_seconds=0, drain=drain, ready=False
    ) as port:

        async def status(*service: str) -> int:
            arguments = [f"127.0.0.1:{port}", "--timeout-seconds", "20", *service]
            return await asyncio.to_thread(probe.main, arguments)

        assert await status() == 0
        assert await status("--service", _SERVICE.full_name) == 1
        assert capsys.readouterr().err == f"{_SERVICE.full_name} is NOT_SERVING\n"
        drain.health.set_ready(True)
        assert await status("--service", _SERVICE.full_name) == 0
        assert await status("--service", "kvloop.Nobody") == 1
        assert capsys.readouterr().err == f"127.0.0.1:{port} has no service kvloop.Nobody\n"
