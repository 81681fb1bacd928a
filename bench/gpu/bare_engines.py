"""Two vLLM servers for the bare protocol, without any code of kvloop.

They are started as kvloop's sidecars start theirs, by the same code: with the same flags
and environment, hence the same KV layout, block size, model runner and UCX. But they have
vLLM's own NixlConnector, and load no plugins.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec
from pydantic_settings import CliApp

from bench.gpu.engines import EnginePair
from kvloop.errors import UnavailableError
from kvloop.stack.plan import EntryPoints, ProcessSpec, plan_stack
from kvloop.stack.ports import PortPool
from services.worker.engine_events import EVENTS_SOCKET
from services.worker.engine_process import EngineProcess, start_engine
from services.worker.launcher import choose_platform, command_for, has_nvidia_gpu, import_root
from services.worker.settings import WorkerSettings

_START_SECONDS = 300.0
_NO_PLUGINS = {"VLLM_PLUGINS": "none"}


@dataclass(frozen=True)
class BareEngines:
    """Two running servers."""

    prefill_url: str
    decode_url: str


@dataclass(frozen=True)
class BareStart:
    """How one server is started.

    Attributes:
        argv: its command line.
        environment: all of it.
    """

    argv: Sequence[str]
    environment: dict[str, str]


@asynccontextmanager
async def bare_engines(pair: EnginePair, run_dir: Path) -> AsyncIterator[BareEngines]:
    """Run a prefill and a decode server while the block runs.

    Args:
        pair: how kvloop would start them.
        run_dir: folder for logs.

    Raises:
        UnavailableError: one did not come up.
    """
    await asyncio.to_thread(run_dir.mkdir, parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        ports = stack.enter_context(PortPool())
        session = await stack.enter_async_context(aiohttp.ClientSession())
        root = stack.enter_context(import_root(pair.engine_python))
        plan = plan_stack(pair.stack_settings(run_dir), EntryPoints(), ports, run_dir)
        started = {}
        for spec in plan.workers:
            start = await asyncio.to_thread(bare_start, spec, root)
            log = run_dir / f"{spec.name}.engine.log"
            engine = start_engine(start.argv, start.environment, log, stop_grace_seconds=5)
            started[spec.engine_url] = await stack.enter_async_context(engine)
        async with asyncio.timeout(_START_SECONDS):
            for url, process in started.items():
                await _until_healthy(session, url, process)
        yield BareEngines(*started)


def bare_start(spec: ProcessSpec, root: Path) -> BareStart:
    """How one server is started: as a sidecar would, but for the code of kvloop.

    Args:
        spec: the sidecar, as kvloop's stack would start it.
        root: from where a sidecar's engine would import kvloop's code.
    """
    flags = spec.argv[len(EntryPoints().worker) :]
    settings = CliApp.run(WorkerSettings, cli_args=list(flags))
    command, _ = command_for(settings, choose_platform(settings.platform, has_nvidia_gpu), root)
    environment = command.environment({**os.environ, **spec.env}) | _NO_PLUGINS
    del environment[EVENTS_SOCKET]  # there is no sidecar
    return BareStart(_with_stock_connector(command.argv), environment)


def _with_stock_connector(argv: Sequence[str]) -> list[str]:
    argv = list(argv)
    at = argv.index("--kv-transfer-config") + 1
    config = msgspec.json.decode(argv[at])
    del config["kv_connector_module_path"]
    config["kv_connector"] = "NixlConnector"
    extra = config["kv_connector_extra_config"]
    config["kv_connector_extra_config"] = {
        name: value for name, value in extra.items() if not name.startswith("kvloop_")
    }
    argv[at] = msgspec.json.encode(config).decode()
    return argv


async def _until_healthy(session: aiohttp.ClientSession, url: str, process: EngineProcess) -> None:
    while process.exit_status is None:
        try:
            async with session.get(f"{url}/health") as answer:
                if answer.status == 200:
                    return
        except aiohttp.ClientError:
            await asyncio.sleep(0.2)
    raise UnavailableError(f"the engine of {url} ended:\n{process.last_lines()}")
