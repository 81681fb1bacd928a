"""Measures an idle decode engine with and without retained turns: python -m bench.idle --help."""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

import aiohttp
import typer

import services
from bench.idle.processes import cpu_seconds, engine_processes
from bench.idle.sidecar import Sidecar
from services.worker import tiny_model
from services.worker.engine_command import EngineOptions, engine_command
from services.worker.engine_process import EngineProcess, start_engine
from services.worker.given_flags import GivenFlags
from services.worker.kv_layout import KvLayout

_START_SECONDS = 300.0
_LEASE_SECONDS = 60
_TTL_SECONDS = 480

app = typer.Typer(add_completion=False)


@app.command()
def measure(
    pins: Annotated[int, typer.Option(help="turns to retain")] = 50,
    seconds: Annotated[float, typer.Option(help="how long to watch an idle engine")] = 20.0,
    requests: Annotated[int, typer.Option(help="requests after a pause, each way")] = 40,
    model: Annotated[Path | None, typer.Option(help="model folder; a tiny one if absent")] = None,
    import_root: Annotated[
        Path,
        typer.Option(help="folder of the `services` to measure; run elsewhere if it is another"),
    ] = Path(services.__path__[0]).parent,
    port: Annotated[int, typer.Option(help="of the engine; the next one is NIXL's")] = 18400,
) -> None:
    """Measure CPU of an idle vLLM decode engine, and its first token after a pause."""
    asyncio.run(_measure(pins, seconds, requests, model, import_root.resolve(), port))


async def _measure(
    pins: int, seconds: float, requests: int, model: Path | None, import_root: Path, port: int
) -> None:
    with tempfile.TemporaryDirectory(prefix="idle-") as folder:
        directory = Path(folder)
        if model is None:
            model = directory / "tiny"
            tiny_model.make(model)
        async with (
            Sidecar(directory / "events.sock") as sidecar,
            _engine(model, directory, import_root, port) as (engine, bench),
        ):
            await bench.wait_until_healthy(engine)
            await bench.first_tokens(5)  # warm-up
            _report(0, await _idle_cpu(engine, seconds), await bench.first_tokens(requests))
            await bench.retain(pins)
            await sidecar.wait_for_pins(pins)
            _report(pins, await _idle_cpu(engine, seconds), await bench.first_tokens(requests))
            sys.stdout.write(f"still retained: {sidecar.retained}\n")


def _report(pins: int, cpu: dict[str, float], first_tokens: list[float]) -> None:
    shares = ", ".join(f"{name} {share:.1%}" for name, share in sorted(cpu.items()))
    quartiles = statistics.quantiles(first_tokens, n=4)
    times = " / ".join(f"{value * 1e3:.1f}" for value in quartiles)
    sys.stdout.write(
        f"{pins} pins: CPU of one core: {shares}; all {sum(cpu.values()):.1%}; "
        f"first token after a pause, quartiles in ms: {times}\n"
    )


async def _idle_cpu(engine: EngineProcess, seconds: float) -> dict[str, float]:
    """Share of one core that each of the engine's processes takes."""
    await asyncio.sleep(2)
    processes = engine_processes(engine.pid)
    before = {name: cpu_seconds(pid) for name, pid in processes.items()}
    begun = time.monotonic()
    await asyncio.sleep(seconds)
    elapsed = time.monotonic() - begun
    return {name: (cpu_seconds(pid) - before[name]) / elapsed for name, pid in processes.items()}


class _Bench:
    """Requests to the engine under test."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url = url
        self._session = session
        self._random = random.Random(1)

    async def wait_until_healthy(self, engine: EngineProcess) -> None:
        """Wait for the HTTP server."""
        async with asyncio.timeout(_START_SECONDS):
            while True:
                if engine.exit_status is not None:
                    raise RuntimeError(engine.last_lines())
                try:
                    async with self._session.get(f"{self._url}/health") as response:
                        if response.status == 200:
                            return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.5)

    async def first_tokens(self, count: int) -> list[float]:
        """Seconds to the only token of short requests, each after a pause."""
        times = []
        for _ in range(count):
            await asyncio.sleep(self._random.uniform(0.4, 0.6))
            begun = time.perf_counter()
            await self._complete(16, 1, {})
            times.append(time.perf_counter() - begun)
        return times

    async def retain(self, count: int) -> None:
        """End turns that stay retained."""
        for number in range(count):
            params = {"kv_transfer_params": {"kvloop_turn_id": f"turn-{number}"}}
            await self._complete(100, 8, params)

    async def _complete(self, prompt: int, tokens: int, fields: Mapping[str, object]) -> None:
        body = {
            "model": "idle",
            "prompt": [self._random.randrange(300, 4000) for _ in range(prompt)],
            "max_tokens": tokens,
            "min_tokens": tokens,
            "temperature": 0,
            **fields,
        }
        async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
            text = await response.text()
            if response.status != 200:
                raise RuntimeError(text)
            json.loads(text)


@asynccontextmanager
async def _engine(
    model: Path, directory: Path, import_root: Path, port: int
) -> AsyncIterator[tuple[EngineProcess, _Bench]]:
    command = engine_command(
        EngineOptions(
            role="decode",
            platform="cpu",
            python=sys.executable,
            model=str(model),
            model_is_local=True,
            served_model_name="idle",
            port=port,
            side_channel_host="127.0.0.1",
            side_channel_port=port + 1,
            events_socket=directory / "events.sock",
            import_root=import_root,
            kv_recompute_threshold=64,
            decoder_kv_blocks_ttl_seconds=_TTL_SECONDS,
            pin_lease_seconds=_LEASE_SECONDS,
            kv_layout=KvLayout(block_size=32, cross_layers=False, reason="measured as it is"),
            cpu_kv_cache_gib=None,
            cpu_threads=None,
            extra_args=(),
            given=GivenFlags(),
        )
    )
    async with (
        aiohttp.ClientSession() as session,
        start_engine(
            command.argv,
            command.environment(os.environ),
            directory / "engine.log",
            stop_grace_seconds=10,
        ) as process,
    ):
        yield process, _Bench(f"http://127.0.0.1:{port}", session)


if __name__ == "__main__":
    app()
