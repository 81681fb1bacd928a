"""The bare protocol: both legs straight to two vLLM servers with stock NixlConnector.

No router, ledger, sidecar or proof. What kvloop adds to the time to the first token is
seen beside it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from bench.gpu.engines import EnginePair
from kvloop.bench.turns import TurnRequest, TurnResult
from kvloop.errors import UnavailableError
from services.worker.engine_command import EngineOptions, Role, engine_command
from services.worker.engine_process import EngineProcess, start_engine
from services.worker.kv_layout import KvLayout

_NO_HANDLE = {"do_remote_decode": True, "do_remote_prefill": False}
_SURPLUS_TOKENS = 512
"""More than is read of a stream: hanging up early makes decode free its blocks, while
an answer that ends by itself is retained for the whole TTL."""
_PORTS: dict[Role, tuple[int, int]] = {"prefill": (8300, 5800), "decode": (8400, 5900)}
_START_SECONDS = 300.0


class BareTurns:
    """Implements TurnRunner on two vLLM servers.

    vLLM 0.25 puts decode's handle into whole replies only. So a turn that leaves a
    handle for the next one is not streamed, and its time to the first token is that of
    the whole answer: look at last turns alone.

    Args:
        session: for both servers.
        prefill_url: of the prefill server.
        decode_url: of the decode server.
        model: served model name.
        clock: monotonic seconds.
        last_ids: see KvloopTurns.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        prefill_url: str,
        decode_url: str,
        model: str,
        clock: Callable[[], float],
        *,
        last_ids: bool = True,
    ) -> None:
        self._session = session
        self._prefill_url = prefill_url
        self._decode_url = decode_url
        self._model = model
        self._clock = clock
        self._last_ids = last_ids
        self._handles: dict[str, dict[str, Any]] = {}

    async def run(self, request: TurnRequest) -> TurnResult:
        """See TurnRunner."""
        started = self._clock()
        prompt = msgspec.Raw(msgspec.json.encode(request.prompt))
        handle = self._handles.pop(request.conversation, None) if request.reuse else None
        prefilled = await self._whole(
            self._prefill_url,
            self._body(request, prompt, handle or _NO_HANDLE, max_tokens=1),
        )
        params = prefilled["kv_transfer_params"]
        handed_over = self._clock()
        if request.reuse and not request.last:
            body = self._body(request, prompt, params, max_tokens=request.answer_tokens)
            answer = await self._whole(self._decode_url, body)
            self._handles[request.conversation] = answer["kv_transfer_params"]
            tokens, times = answer["choices"][0]["token_ids"], [self._clock()]
        else:
            surplus = request.answer_tokens + _SURPLUS_TOKENS
            body = self._body(request, prompt, params, max_tokens=surplus, stream=True)
            with_ids = self._with_ids(request)
            tokens, times = await self._stream(body, request.answer_tokens, with_ids)
        pulled_tokens = handle["remote_num_tokens"] if handle else 0
        return _result(
            request, tokens, times, started, handed_over=handed_over, pulled_tokens=pulled_tokens
        )

    async def end(self, conversation: str) -> None:
        """See TurnRunner. A handle that is left is spent on a prompt of one token."""
        handle = self._handles.pop(conversation, None)
        if handle is not None:
            request = TurnRequest(conversation, [11], 1, True, True)
            prompt = msgspec.Raw(b"[11]")
            await self._whole(self._prefill_url, self._body(request, prompt, handle, max_tokens=1))

    def _body(
        self,
        request: TurnRequest,
        prompt: msgspec.Raw,
        params: dict[str, Any] | None,
        **members: Any,
    ) -> bytes:
        return msgspec.json.encode(
            {
                "model": self._model,
                "prompt": prompt,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": self._with_ids(request),
                "cache_salt": request.conversation,
                **({} if params is None else {"kv_transfer_params": params}),
                **members,
            }
        )

    def _with_ids(self, request: TurnRequest) -> bool:
        return self._last_ids or not request.last

    async def _whole(self, url: str, body: bytes) -> dict[str, Any]:
        async with self._post(url, body) as answer:
            whole: dict[str, Any] = msgspec.json.decode(await answer.read())
            return whole

    async def _stream(
        self, body: bytes, enough: int, with_ids: bool
    ) -> tuple[list[int], list[float]]:
        """Tokens, and when chunks came; without ids every chunk counts as a token."""
        tokens: list[int] = []
        times = []
        async with self._post(self._decode_url, body) as answer:
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                choices = msgspec.json.decode(line[len(b"data: ") :]).get("choices") or []
                if choices and (choices[0].get("token_ids") or not with_ids):
                    times.append(self._clock())
                    tokens += choices[0].get("token_ids") or ()
                if (len(tokens) if with_ids else len(times)) >= enough:
                    answer.close()
                    return tokens, times
        raise UnavailableError("the stream ended early")

    @asynccontextmanager
    async def _post(self, url: str, body: bytes) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.post(
                f"{url}/v1/completions", data=body, headers=headers
            ) as answer:
                if answer.status != 200:
                    raise UnavailableError(f"{url} answered {answer.status}: {await answer.text()}")
                yield answer
        except aiohttp.ClientError as error:
            raise UnavailableError(f"{url}: {error}") from error


class DecodeAlone(BareTurns):
    """Takes turns on the decode server alone, as steady load on it; nothing is retained."""

    async def run(self, request: TurnRequest) -> TurnResult:
        """See TurnRunner."""
        started = self._clock()
        prompt = msgspec.Raw(msgspec.json.encode(request.prompt))
        surplus = request.answer_tokens + _SURPLUS_TOKENS
        body = self._body(request, prompt, None, max_tokens=surplus, stream=True)
        tokens, times = await self._stream(body, request.answer_tokens, self._with_ids(request))
        return _result(request, tokens, times, started, handed_over=started, pulled_tokens=0)


def _result(
    request: TurnRequest,
    tokens: list[int],
    times: list[float],
    started: float,
    *,
    handed_over: float,
    pulled_tokens: int,
) -> TurnResult:
    return TurnResult(
        token_ids=tuple(tokens[: request.answer_tokens]),
        ttft_seconds=times[0] - started,
        total_seconds=times[-1] - started,
        gaps_seconds=tuple(after - before for before, after in pairwise(times)),
        prefill_leg_seconds=handed_over - started,
        decode_leg_seconds=times[0] - handed_over,
        prompt_tokens=len(request.prompt),
        pulled_tokens=pulled_tokens,
        cached_tokens=0,
        recomputed_tokens=0,
        miss_reason=None,
        retained_tokens=0,
    )


@dataclass(frozen=True)
class BareEngines:
    """Two running servers."""

    prefill_url: str
    decode_url: str


@asynccontextmanager
async def bare_engines(pair: EnginePair, run_dir: Path) -> AsyncIterator[BareEngines]:
    """A prefill and a decode server as kvloop starts them, but with vLLM's own connector.

    Args:
        pair: how kvloop would start them.
        run_dir: folder for logs.

    Raises:
        UnavailableError: one did not come up.
    """
    await asyncio.to_thread(run_dir.mkdir, parents=True, exist_ok=True)
    async with AsyncExitStack() as stack, aiohttp.ClientSession() as session:
        processes = [
            await stack.enter_async_context(_start(pair, role, run_dir))
            for role in ("prefill", "decode")
        ]
        urls = [f"http://127.0.0.1:{_PORTS[role][0]}" for role in ("prefill", "decode")]
        async with asyncio.timeout(_START_SECONDS):
            for url, process in zip(urls, processes, strict=True):
                await _until_healthy(session, url, process)
        yield BareEngines(*urls)


@asynccontextmanager
async def _start(pair: EnginePair, role: Role, run_dir: Path) -> AsyncIterator[EngineProcess]:
    port, side_channel_port = _PORTS[role]
    command = engine_command(
        EngineOptions(
            role=role,
            platform=pair.platform,
            python=pair.engine_python,
            model=pair.model,
            model_is_local=True,
            served_model_name=pair.model_name,
            port=port,
            side_channel_host="127.0.0.1",
            side_channel_port=side_channel_port,
            events_socket=run_dir / f"{role}.sock",
            import_root=Path(__file__).parents[2],
            kv_recompute_threshold=64,
            decoder_kv_blocks_ttl_seconds=480,
            pin_lease_seconds=60,
            kv_layout=KvLayout(None, pair.kv_layout == "cross-layers", "as kvloop's own")
            if pair.platform == "cuda"
            else KvLayout(32, False, "the CPU build's recipe"),
            cpu_kv_cache_gib=None,
            cpu_threads=None,
            extra_args=pair.args_of(role),
        )
    )
    command = replace(command, argv=_with_stock_connector(command.argv))
    # Without kvloop's plugin, which shortens the prompt that decode streams are given.
    environment = command.environment({**os.environ, **pair.env, "VLLM_PLUGINS": "none"})
    log = run_dir / f"{role}.engine.log"
    async with start_engine(command.argv, environment, log, stop_grace_seconds=5) as process:
        yield process


def _with_stock_connector(argv: Sequence[str]) -> list[str]:
    argv = list(argv)
    at = argv.index("--kv-transfer-config") + 1
    config = msgspec.json.decode(argv[at])
    del config["kv_connector_module_path"]
    config["kv_connector"] = "NixlConnector"
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
