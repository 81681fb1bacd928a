"""A test of the tests: stock NixlConnector gets the edited history wrong.

If this fails, either vLLM has learned to prove what it pulls, or the histories
of the other tests no longer tell right from wrong.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from services.worker.engine_command import EngineOptions, engine_command
from services.worker.given_flags import GivenFlags
from services.worker.kv_layout import KvLayout
from tests.engine.engines import EngineProbe, eventually, open_session
from tests.engine.turns import ANSWER, first_turn, take_handle
from tests.engine.world import MODEL, World

PORT, SIDE_CHANNEL_PORT = 8951, 8952


@asynccontextmanager
async def _stock_prefill(model: Path, log: Path) -> AsyncIterator[str]:
    """A prefill server as the launcher starts it, but with vLLM's own connector."""
    command = engine_command(
        EngineOptions(
            role="prefill",
            platform="cpu",
            python=sys.executable,
            model=str(model),
            model_is_local=True,
            served_model_name=MODEL,
            port=PORT,
            side_channel_host="127.0.0.1",
            side_channel_port=SIDE_CHANNEL_PORT,
            events_socket=log.with_suffix(".sock"),
            import_root=Path(__file__).parents[2],
            kv_recompute_threshold=64,
            decoder_kv_blocks_ttl_seconds=60,
            pin_lease_seconds=60,
            kv_layout=KvLayout(32, False, "the CPU build's recipe"),
            cpu_kv_cache_gib=None,
            cpu_threads=None,
            extra_args=[],
            given=GivenFlags(),
        )
    )
    argv = [
        argument.replace("KvloopConnector", "NixlConnector").replace(
            '"kv_connector_module_path": "services.worker.connector", ', ""
        )
        for argument in command.argv
    ]
    (transfer_config,) = [argument for argument in argv if "kv_connector" in argument]
    # kvloop_pin_lease is left in, which vLLM's own connector does not know.
    assert "KvloopConnector" not in transfer_config
    assert "services.worker" not in transfer_config
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *argv,
            env=command.environment(os.environ),
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{PORT}"

    async def healthy() -> bool:
        assert process.returncode is None, f"the stock engine ended; see {log}"
        try:
            async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False

    try:
        await eventually(healthy, "the stock engine answers", seconds=240)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def test_stock_connector_answers_wrongly_where_kvloop_is_exact(
    world: World, model_directory: Path, tmp_path: Path
) -> None:
    async with (
        _stock_prefill(model_directory, tmp_path / "stock.log") as url,
        open_session() as session,
    ):
        history = await first_turn(world, conversation := world.conversation())
        prompt = history[:630] + history[660:] + world.tokens(25)
        right = await world.prefill.recompute_prompt(prompt, ANSWER)
        await world.prefill.forget_prefixes()

        handle = json.loads((await take_handle(world, conversation)).transfer_params_json)
        stock = EngineProbe(url, session, MODEL)
        before = await stock.pulled_tokens()
        got = await _two_legs(session, url, world.decode.url, prompt, handle)
        assert await stock.pulled_tokens() - before > 608, "it pulled more than the two share"
        assert got != right

        history = await first_turn(world, conversation := world.conversation())
        prompt = history[:630] + history[660:] + world.tokens(25)
        right = await world.prefill.recompute_prompt(prompt, ANSWER)
        await world.prefill.forget_prefixes()
        handle = json.loads((await take_handle(world, conversation)).transfer_params_json)
        assert (
            await _two_legs(session, world.prefill.url, world.decode.url, prompt, handle) == right
        )


async def _two_legs(
    session: aiohttp.ClientSession,
    prefill: str,
    decode: str,
    prompt: list[int],
    handle: dict[str, Any],
) -> tuple[int, ...]:
    """Both legs as the reference proxy takes them: params relayed, nothing checked."""
    body = {"model": MODEL, "prompt": prompt, "temperature": 0}
    first = {**body, "max_tokens": 1, "ignore_eos": True, "kv_transfer_params": handle}
    async with session.post(f"{prefill}/v1/completions", json=first) as answer:
        params = (await answer.json())["kv_transfer_params"]
    second = {
        **body,
        "max_tokens": ANSWER,
        "return_token_ids": True,
        "kv_transfer_params": {**params, "kvloop_retain": False},
    }
    async with session.post(f"{decode}/v1/completions", json=second) as answer:
        return tuple((await answer.json())["choices"][0]["token_ids"])
