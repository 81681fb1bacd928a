"""The two endpoints that generate: what happens between a request and its reply."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from services.sim.api_errors import ApiError, error_type, internal_error, invalid_body
from services.sim.api_requests import ChatRequest, CompletionRequest, parse
from services.sim.control import EngineControl
from services.sim.core import EngineCore
from services.sim.faults import Fault, FaultKind, first
from services.sim.jobs import Job, JobMaker
from services.sim.reply_writer import Message, ReplyWriter, Send
from services.sim.sequence import Ending, Output
from services.worker.clock import Clock
from services.worker.race import race

Scope = Message
Receive = Callable[[], Awaitable[Message]]

_COUNTED = (
    FaultKind.DIE,
    FaultKind.STALL,
    FaultKind.STREAM_ERROR,
    FaultKind.RESTART,
    FaultKind.EXIT,
)
"""Faults that strike after a number of tokens."""

_json = msgspec.json.Encoder()


@dataclass(frozen=True)
class GenerateParts:
    """What the endpoints work with."""

    core: EngineCore
    jobs: JobMaker
    control: EngineControl
    clock: Clock
    wall_clock: Callable[[], float]
    """Seconds since the epoch."""


class GenerateEndpoint:
    """An ASGI application for one of the endpoints.

    Args:
        parts: the engine.
        body_type: the endpoint's body.
    """

    def __init__(
        self, parts: GenerateParts, body_type: type[ChatRequest] | type[CompletionRequest]
    ) -> None:
        self._parts = parts
        self._body_type = body_type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. A client that goes away ends the work at once."""
        body = await _read_body(receive)
        if body is not None:
            await race(self._serve(scope, body, send), _until_disconnected(receive))

    async def _serve(self, scope: Scope, body: bytes, send: Send) -> None:
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        try:
            await self._exchange(scope, headers, body, send).run()
        except ApiError as error:
            await ReplyWriter(send, (), self._parts.clock).whole(error.status, error.to_json())
        except _HungUpError:
            await asyncio.Event().wait()  # until the server has noticed, too

    def _exchange(
        self, scope: Scope, headers: dict[str, str], body: bytes, send: Send
    ) -> _Exchange:
        if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise invalid_body(
                "body", "value_error", "Unsupported Media Type: Only application/json is allowed"
            )
        request = parse(body, self._body_type)
        faults = self._parts.jobs.faults(request, headers)
        writer = ReplyWriter(send, faults, self._parts.clock)
        name = headers.get("x-request-id")
        return _Exchange(self._parts, request, faults, name, tuple(scope["client"]), writer)


class _HungUpError(Exception):
    """The connection is closed; there is nobody to reply to."""


class _Exchange:
    """One request and its reply."""

    def __init__(
        self,
        parts: GenerateParts,
        request: ChatRequest | CompletionRequest,
        faults: list[Fault],
        name: str | None,
        client: tuple[str, int],
        writer: ReplyWriter,
    ) -> None:
        self._parts = parts
        self._request = request
        self._faults = faults
        self._name = name
        self._client = client
        self._writer = writer
        self._pending = [fault for fault in faults if fault.kind in _COUNTED]

    async def run(self) -> None:
        """Serve the request, or fail as asked for."""
        try:
            await self._strike_first()
            job = self._job()
        except ApiError as error:
            if error.status < 500 and not error.while_parsing:
                self._parts.core.reject(self._request.kv_transfer_params)
            await self._writer.whole(error.status, error.to_json())
            return
        core = self._parts.core
        try:
            await self._wait_overhead(job)
            for sequence in job.sequences:
                sequence.arrived_at = self._parts.clock.monotonic()
                core.submit(sequence)
            if self._request.stream:
                await self._stream(job)
            else:
                await self._reply(job)
        finally:
            for sequence in job.sequences:
                core.abort(sequence)

    def _job(self) -> Job:
        make: Callable[..., Job] = (
            self._parts.jobs.chat
            if isinstance(self._request, ChatRequest)
            else self._parts.jobs.completion
        )
        return make(self._request, self._faults, self._name, self._parts.wall_clock())

    async def _wait_overhead(self, job: Job) -> None:
        spec = self._parts.core.spec
        seconds = spec.profile.request_overhead(job.prompt_tokens) * spec.time_scale
        if seconds:
            await self._parts.clock.sleep(seconds)

    async def _reply(self, job: Job) -> None:
        try:
            await self._strike(job)
            while not job.ended:
                for output in await job.channel.take():
                    await self._take(job, output)
        except ApiError as error:
            await self._writer.whole(error.status, error.to_json())
            return
        whole = job.replies.whole(job.choices, job.usage(), job.params)
        await self._writer.whole(200, _json.encode(whole))

    async def _stream(self, job: Job) -> None:
        await self._writer.open_stream()
        try:
            await self._strike(job)
            opening = [_json.encode(chunk) for chunk in job.replies.opening()]
            while not job.ended:
                await self._pass_on(job, await job.channel.take(), opening)
                opening = []
        except ApiError as error:
            await self._writer.events([error.to_json()])
        else:
            if self._request.include_usage:
                usage = job.replies.usage_chunk(job.usage())
                await self._writer.events([_json.encode(usage)])
        await self._writer.close_stream()

    async def _pass_on(self, job: Job, outputs: list[Output], opening: list[bytes]) -> None:
        """Write what has come out of the engine together in one piece."""
        events = opening
        try:
            for output in outputs:
                if self._pending and self._is_due(job.sent_tokens + 1):
                    await self._writer.events(events)
                    events = []
                if (chunk := await self._take(job, output)) is not None:
                    events.append(_json.encode(chunk))
        except ApiError:
            await self._writer.events(events)
            raise
        await self._writer.events(events)

    async def _take(self, job: Job, output: Output) -> dict[str, Any] | None:
        """One output: its chunk, if it makes one."""
        if output.ending is Ending.ERROR:
            raise internal_error()
        choice = job.choices[output.choice]
        delta = choice.add(output)
        if delta is None:
            return None
        if output.choice == 0 and output.params is not None:
            job.params = output.params
        if delta.finish_reason is not None:
            # A stop string ends the answer before the engine knows.
            self._parts.core.abort(job.sequences[output.choice])
        chunk: dict[str, Any] | None = None
        if self._request.stream:
            chunk = job.replies.chunk(output.choice, delta)
            if self._request.usage_in_every_chunk:
                chunk["usage"] = job.usage().to_json(nulls=False)
            if output.params is not None and self._parts.core.spec.params_in_streams:
                chunk["kv_transfer_params"] = output.params
        job.sent_tokens += 1
        if self._pending:
            if chunk is not None and self._is_due(job.sent_tokens):
                await self._writer.events([_json.encode(chunk)])
                chunk = None
            await self._strike(job)
        return chunk

    def _is_due(self, tokens: int) -> bool:
        return any(fault.after_tokens <= tokens for fault in self._pending)

    async def _strike_first(self) -> None:
        """Faults that come before the engine sees the request."""
        if fault := first(self._faults, FaultKind.REFUSE):
            self._parts.control.refuse(fault.seconds)
        if first(self._faults, FaultKind.DROP):
            self._hang_up()
        if fault := first(self._faults, FaultKind.HANG):
            await self._sleep(fault.seconds)
        if fault := first(self._faults, FaultKind.STATUS):
            raise ApiError(fault.message, status=fault.code, type=error_type(fault.code))

    async def _strike(self, job: Job) -> None:
        """Faults whose number of tokens has come out."""
        for fault in [f for f in self._pending if f.after_tokens <= job.sent_tokens]:
            self._pending.remove(fault)
            match fault.kind:
                case FaultKind.DIE:
                    self._hang_up()
                case FaultKind.STALL:
                    await self._sleep(fault.seconds)
                case FaultKind.STREAM_ERROR:
                    raise internal_error()
                case FaultKind.RESTART:
                    self._parts.control.restart(fault.seconds)
                    await self._sleep(0)
                case _:
                    self._parts.control.exit()
                    await self._sleep(0)

    def _hang_up(self) -> None:
        self._parts.control.hang_up(self._client)
        raise _HungUpError

    async def _sleep(self, seconds: float) -> None:
        """Sleep; 0: until the client or the engine is gone."""
        if seconds:
            await self._parts.clock.sleep(seconds)
        else:
            await asyncio.Event().wait()


async def _read_body(receive: Receive) -> bytes | None:
    """The whole body; None if the client has gone."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
