"""A decode engine whose leases are short, and a sidecar that can be killed beside it.

The engine is started here, and the sidecar attaches to it, so that the engine goes
on when its sidecar is killed.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from kvloop import rpc
from kvloop.errors import KvloopError
from kvloop.kvmeta.v1 import ledger_pb2, ledger_pb2_grpc
from kvloop.stack.ports import LOOPBACK, PortPool
from kvloop.worker.v1 import worker_pb2, worker_pb2_grpc
from services.worker.launcher import launch
from services.worker.settings import WorkerSettings
from tests.engine.conftest import MODEL, World
from tests.engine.engines import EngineProbe, eventually

LEASE_SECONDS = 20
RETENTION_SECONDS = 120
NUM_BLOCKS = 640
"""Few, so that conversations of a test's size fill them."""
WORKER_ID = "decode-leased"


class LeasedDecode:
    """The engine and its sidecar. Made by `leased_decode`."""

    def __init__(self, world: World, probe: EngineProbe, argv: list[str], address: str) -> None:
        self.world = world
        self.probe = probe
        self.address = address
        self._argv = argv
        self._sidecar: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Start the sidecar; returns when the router sends turns to it."""
        self._spawn()

        async def used() -> bool:
            try:
                return (await self.info()).registered and bool(await self.world.client.models())
            except KvloopError:
                return False

        await eventually(used, "the sidecar is registered", seconds=60)

    def _spawn(self) -> None:
        log = self.world.stack.run_dir / f"{WORKER_ID}.log"
        with log.open("ab") as output:
            self._sidecar = subprocess.Popen(self._argv, stdout=output, stderr=output)

    def kill(self) -> None:
        """kill -9."""
        if self._sidecar is not None:
            self._sidecar.kill()
            self._sidecar.wait()
            self._sidecar = None

    async def info(self) -> worker_pb2.GetWorkerInfoResponse:
        """What the sidecar says of itself."""
        async with rpc.open_channel(self.address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            with rpc.typed_errors():
                info: worker_pb2.GetWorkerInfoResponse = await stub.GetWorkerInfo(
                    worker_pb2.GetWorkerInfoRequest(), timeout=5
                )
        return info

    async def blocks(self) -> int:
        """KV blocks in use, by the engine's own gauge."""
        return round(await self.probe.kv_usage() * NUM_BLOCKS)

    async def owned(self) -> list[ledger_pb2.Pin]:
        """Pins that a conversation owns, as the ledger has them."""
        async with rpc.open_channel(self.world.stack.kvmeta_address) as channel:
            stub = ledger_pb2_grpc.LedgerServiceStub(channel)
            listed = await stub.ListPins(
                ledger_pb2.ListPinsRequest(worker_id=WORKER_ID, page_size=1000)
            )
        return list(listed.pins)

    async def down_to(self, blocks: int, what: str, seconds: float = 2.0) -> None:
        """Wait until no more blocks than that are in use."""

        async def holds() -> bool:
            return await self.blocks() <= blocks

        await eventually(holds, what, seconds)


@asynccontextmanager
async def leased_decode(world: World, model: Path) -> AsyncIterator[LeasedDecode]:
    """Put it in the place of the stack's own decode worker, which is not started again."""
    await world.stack.stop("decode-0")
    run_dir = world.stack.run_dir
    async with AsyncExitStack() as stack:
        ports = stack.enter_context(PortPool())
        listen = f"{LOOPBACK}:{ports.take(7450)}"
        values: dict[str, Any] = {
            "role": "decode",
            "worker_id": WORKER_ID,
            "listen": listen,
            "model": str(model),
            "served_model_name": MODEL,
            "engine_port": ports.take(8250),
            "side_channel_port": ports.take(5750),
            "events_socket": run_dir / f"{WORKER_ID}.sock",
            "engine_log": run_dir / f"{WORKER_ID}.engine.log",
            "pin_lease_seconds": LEASE_SECONDS,
            "decoder_kv_blocks_ttl_seconds": RETENTION_SECONDS,
            "engine_args": f"--num-gpu-blocks-override {NUM_BLOCKS}",
        }
        settings = WorkerSettings(**values)
        await stack.enter_async_context(launch(settings))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        probe = EngineProbe(settings.engine_base_url, session, MODEL)
        argv = [
            *(sys.executable, "-m", "services.worker"),
            "--role=decode",
            f"--worker-id={WORKER_ID}",
            f"--listen={listen}",
            f"--kvmeta={world.stack.kvmeta_address}",
            f"--served-model-name={MODEL}",
            f"--engine-url={settings.engine_base_url}",
            f"--events-socket={settings.events_socket}",
            "--retention-policy=lru",
            "--settle-timeout-seconds=5",
        ]
        decode = LeasedDecode(world, probe, argv, listen)
        stack.callback(decode.kill)
        await _healthy(session, settings.engine_base_url)
        await decode.start()
        yield decode


async def _healthy(session: aiohttp.ClientSession, url: str) -> None:
    async def answers() -> bool:
        try:
            async with session.get(f"{url}/health") as reply:
                return reply.status == 200
        except aiohttp.ClientError:
            return False

    await eventually(answers, "the engine answers", seconds=200)
