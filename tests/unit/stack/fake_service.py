"""Stands in for each service: serves gRPC health, and ListModels as a router.

    python fake_service.py NAME [--flag value | --flag=value]...

Flags of its own: --fake-exit (log something and exit 3), --fake-not-ready (never
SERVING), --fake-stubborn (ignore SIGTERM), --fake-engine (start a process in a
session of its own and leave it behind).
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from kvloop.router.v1 import router_pb2, router_pb2_grpc
from services.common import rpc_server
from services.common.tls import ServerFiles, ServerTls


class _Router(router_pb2_grpc.RouterServiceServicer):
    async def ListModels(self, request, context):
        model = router_pb2.Model(name="tiny", prefill_workers=1, decode_workers=1)
        return router_pb2.ListModelsResponse(models=[model])


def _flag(name: str) -> str | None:
    for index, argument in enumerate(sys.argv):
        if argument == name:
            return sys.argv[index + 1] if index + 1 < len(sys.argv) else ""
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
    return None


def _log(event: str, **facts: object) -> None:
    sys.stderr.write(json.dumps({**facts, "event": event, "level": "info"}) + "\n")


def _tls() -> ServerTls | None:
    names = ("--tls-certificate-file", "--tls-key-file", "--tls-client-ca-file")
    paths = [Path(value) for name in names if (value := _flag(name))]
    return ServerTls(ServerFiles(*paths), clock=time.monotonic) if paths else None


async def _serve() -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(
        signal.SIGTERM, (lambda: None) if _flag("--fake-stubborn") is not None else stop.set
    )
    listen = _flag("--listen") or ""
    if _flag("--fake-not-ready") is not None:
        _log("engine_loading", phase="loading weights")
        await stop.wait()
        return
    if _flag("--fake-exit") is not None:
        _log("engine_failed", exception="Traceback\nMemoryError: no room")
        sys.exit(3)
    async with rpc_server.serve(
        listen,
        lambda server: router_pb2_grpc.add_RouterServiceServicer_to_server(
            _Router(),  # type: ignore[abstract]
            server,
        ),
        [],
        grace_seconds=0,
        tls=_tls(),
    ):
        _log("serving", argv=sys.argv[1:])
        await stop.wait()


if __name__ == "__main__":
    if _flag("--fake-engine") is not None:
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    asyncio.run(_serve())
