"""Engines that outlive their sidecars, and sidecars that can be killed beside them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvloop import rpc
from kvloop.errors import KvloopError
from kvloop.stack.ports import LOOPBACK, PortPool
from kvloop.worker.v1 import worker_pb2, worker_pb2_grpc
from services.worker.engine_command import Role
from services.worker.settings import WorkerSettings
from tests.engine.engines import eventually

_FIRST_PORTS = {"prefill": (7350, 8150, 5650), "decode": (7450, 8250, 5750)}


def engine_settings(
    role: Role, worker_id: str, model: Path, run_dir: Path, ports: PortPool, **more: Any
) -> WorkerSettings:
    """How to start an engine by itself, and where its sidecar will be."""
    sidecar, engine, side_channel = (ports.take(first) for first in _FIRST_PORTS[role])
    values: dict[str, Any] = {
        "role": role,
        "worker_id": worker_id,
        "listen": f"{LOOPBACK}:{sidecar}",
        "model": str(model),
        "engine_port": engine,
        "side_channel_port": side_channel,
        "events_socket": run_dir / f"{worker_id}.sock",
        "engine_log": run_dir / f"{worker_id}.engine.log",
        **more,
    }
    return WorkerSettings(**values)


class AttachedSidecar:
    """A sidecar beside an engine that runs already.

    Args:
        engine: how that engine was started.
        engine_url: where the sidecar finds it.
        kvmeta: host:port.
        log: file that its output is appended to.
        args: further flags.
    """

    def __init__(
        self,
        engine: WorkerSettings,
        *,
        engine_url: str,
        kvmeta: str,
        log: Path,
        args: Sequence[str] = (),
    ) -> None:
        self.worker_id = engine.worker_id
        self.address = engine.listen
        self._log = log
        self._argv = [
            *(sys.executable, "-m", "services.worker"),
            f"--role={engine.role}",
            f"--worker-id={engine.worker_id}",
            f"--listen={engine.listen}",
            f"--kvmeta={kvmeta}",
            f"--served-model-name={engine.model_name}",
            f"--engine-url={engine_url}",
            f"--events-socket={engine.events_socket}",
        ]
        self._args = args
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self, args: Sequence[str] | None = None) -> None:
        """Start it; returns when it is registered, which may take as long as its engine.

        Args:
            args: further flags from now on; None leaves them as they are.
        """
        if args is not None:
            self._args = args
        self._spawn()

        async def registered() -> bool:
            try:
                return (await self.info()).registered
            except KvloopError:
                return False

        await eventually(registered, "the sidecar is registered", seconds=240)

    def _spawn(self) -> None:
        argv = [*self._argv, *self._args]
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(argv, stdout=output, stderr=output)

    async def stop(self) -> None:
        """End it in good order, so that the router turns to others at once."""
        if self._process is not None:
            self._process.terminate()
            await asyncio.to_thread(self._process.wait)
            self._process = None

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    async def info(self) -> worker_pb2.GetWorkerInfoResponse:
        """What it says of itself."""
        async with rpc.open_channel(self.address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            with rpc.typed_errors():
                info: worker_pb2.GetWorkerInfoResponse = await stub.GetWorkerInfo(
                    worker_pb2.GetWorkerInfoRequest(), timeout=10
                )
        return info
