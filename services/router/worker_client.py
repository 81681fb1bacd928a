"""One worker as the router sees it: a port and its gRPC form."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

import grpc

from kvloop.errors import KvloopError, TlsError, UnavailableError, from_rpc_error
from kvloop.rpc import connected, why_not_connected
from kvloop.worker.v1 import worker_pb2, worker_pb2_grpc
from services.common.rpc_tracing import trace_context
from services.router.deadline import Deadline
from services.router.failures import WORKER_LOST, WORKER_UNREACHABLE
from services.router.request import TurnRequest
from services.router.spare_calls import StreamAhead, UnaryAhead


class PreparedLeg(Protocol):
    """A leg's body that was sent ahead."""

    def waits(self) -> bool:
        """Whether the worker has it, or is about to, as far as is known."""
        ...

    def cancel(self) -> None:
        """Give it up, unless the leg has it. May be called again."""
        ...


class WorkerClient(Protocol):
    """Runs legs of turns on one worker.

    Cancelling a call, or closing the generator of `decode`, aborts the engine's
    request. Calls raise the error that the worker raised; UnavailableError with
    reason WORKER_LOST if the connection broke under the call; DeadlineError
    after `timeout_seconds`.
    """

    async def connect(self, *, timeout_seconds: float) -> None:
        """Make sure of a connection, so that a failure here means: nothing was sent.

        Raises:
            UnavailableError: reason WORKER_UNREACHABLE.
        """
        ...

    async def prefill(
        self, request: worker_pb2.PrefillRequest, *, timeout_seconds: float
    ) -> worker_pb2.PrefillResponse:
        """Run the prefill leg."""
        ...

    def decode(
        self, request: worker_pb2.DecodeRequest, *, timeout_seconds: float
    ) -> AsyncGenerator[worker_pb2.DecodeResponse, None]:
        """Run the decode leg: chunks, then one summary."""
        ...

    def prepare_prefill(
        self, leg: worker_pb2.PrefillRequest, *, timeout_seconds: float
    ) -> PreparedLeg | None:
        """Send a prefill leg's body ahead, if the worker takes any. None if not connected.

        The leg itself then goes with `prepared`, and raises PreconditionError
        NOT_PREPARED if the worker turns out not to have the body.
        """
        ...

    def prepare_decode(
        self, leg: worker_pb2.DecodeRequest, *, timeout_seconds: float
    ) -> PreparedLeg | None:
        """The same for a decode leg."""
        ...

    async def count_tokens(
        self, request: worker_pb2.CountTokensRequest, *, timeout_seconds: float
    ) -> worker_pb2.CountTokensResponse:
        """Tokenize without running the model."""
        ...

    async def tokenize(
        self, request: worker_pb2.TokenizeRequest, *, timeout_seconds: float
    ) -> worker_pb2.TokenizeResponse:
        """Pass a request on to the engine's /tokenize."""
        ...

    async def estimate_pull(
        self, request: worker_pb2.EstimatePullRequest, *, timeout_seconds: float
    ) -> worker_pb2.EstimatePullResponse:
        """Ask a prefill worker what a pull would take."""
        ...

    def expect_no_more(self) -> None:
        """No further legs will come: hold nothing ready for them."""
        ...


async def connect_in_time(client: WorkerClient, deadline: Deadline, limit_seconds: float) -> None:
    """Connect, in the time that the turn has left and at most the limit.

    Raises:
        DeadlineError: the turn's time was up first, which says nothing of the worker.
        UnavailableError: see `WorkerClient.connect`.
    """
    try:
        await client.connect(timeout_seconds=deadline.hop_timeout(limit_seconds))
    except UnavailableError:
        deadline.check()
        raise


def prompt_span(request: TurnRequest) -> worker_pb2.Span | None:
    """Where the prompt lies in the body of both legs."""
    place = request.prompt
    return worker_pb2.Span(start=place.start, end=place.end) if place is not None else None


_SERVICE = "/kvloop.worker.v1.WorkerService"
_READY = grpc.ChannelConnectivity.READY


class _Prepared:
    """A call of PreparePrefill or PrepareDecode, which ends when the leg has the body."""

    def __init__(self, call: grpc.aio.UnaryUnaryCall[Any, Any]) -> None:
        self._call = call

    def waits(self) -> bool:
        """See `PreparedLeg.waits`."""
        return not self._call.done()

    def cancel(self) -> None:
        """See `PreparedLeg.cancel`."""
        self._call.cancel()


class GrpcWorkerClient:
    """A worker's sidecar over one channel. See `WorkerClient`."""

    def __init__(self, worker_id: str, channel: grpc.aio.Channel) -> None:
        self._worker_id = worker_id
        self._channel = channel
        self._stub = worker_pb2_grpc.WorkerServiceStub(channel)
        self._prefill = UnaryAhead(
            channel,
            f"{_SERVICE}/Prefill",
            worker_pb2.PrefillRequest.SerializeToString,
            worker_pb2.PrefillResponse.FromString,
        )
        self._decode = StreamAhead(
            channel,
            f"{_SERVICE}/Decode",
            worker_pb2.DecodeRequest.SerializeToString,
            worker_pb2.DecodeResponse.FromString,
        )

    def expect_no_more(self) -> None:
        """See `WorkerClient.expect_no_more`."""
        self._prefill.close()
        self._decode.close()

    async def connect(self, *, timeout_seconds: float) -> None:
        """See `WorkerClient.connect`.

        gRPC reports UNAVAILABLE both for a refused connection and for one that
        broke after the request was sent. Only the channel's state tells whether
        a handle may still be used elsewhere.
        """
        if self._channel.get_state() is _READY:
            return  # as nearly always: no timer is needed
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._ready()
        except TimeoutError:
            raise self._unreachable() from None

    async def prefill(
        self, request: worker_pb2.PrefillRequest, *, timeout_seconds: float
    ) -> worker_pb2.PrefillResponse:
        """See `WorkerClient.prefill`."""
        _trace(request)
        try:
            return await self._prefill(request, timeout_seconds=timeout_seconds)
        except (grpc.RpcError, UnavailableError) as error:
            raise self._typed(error) from error

    async def decode(
        self, request: worker_pb2.DecodeRequest, *, timeout_seconds: float
    ) -> AsyncGenerator[worker_pb2.DecodeResponse, None]:
        """See `WorkerClient.decode`."""
        _trace(request)
        answer = self._decode(request, timeout_seconds=timeout_seconds)
        try:
            async with aclosing(answer) as responses:
                async for response in responses:
                    yield response
        except (grpc.RpcError, UnavailableError) as error:
            raise self._typed(error) from error

    def prepare_prefill(
        self, leg: worker_pb2.PrefillRequest, *, timeout_seconds: float
    ) -> PreparedLeg | None:
        """See `WorkerClient.prepare_prefill`."""
        if self._channel.get_state() is not _READY:
            return None
        _trace(leg)
        request = worker_pb2.PreparePrefillRequest(leg=leg)
        return _Prepared(self._stub.PreparePrefill(request, timeout=timeout_seconds))

    def prepare_decode(
        self, leg: worker_pb2.DecodeRequest, *, timeout_seconds: float
    ) -> PreparedLeg | None:
        """See `WorkerClient.prepare_decode`."""
        if self._channel.get_state() is not _READY:
            return None
        _trace(leg)
        request = worker_pb2.PrepareDecodeRequest(leg=leg)
        return _Prepared(self._stub.PrepareDecode(request, timeout=timeout_seconds))

    async def count_tokens(
        self, request: worker_pb2.CountTokensRequest, *, timeout_seconds: float
    ) -> worker_pb2.CountTokensResponse:
        """See `WorkerClient.count_tokens`."""
        try:
            return await self._stub.CountTokens(request, timeout=timeout_seconds)
        except grpc.RpcError as error:
            raise self._typed(error) from error

    async def tokenize(
        self, request: worker_pb2.TokenizeRequest, *, timeout_seconds: float
    ) -> worker_pb2.TokenizeResponse:
        """See `WorkerClient.tokenize`."""
        try:
            return await self._stub.Tokenize(request, timeout=timeout_seconds)
        except grpc.RpcError as error:
            raise self._typed(error) from error

    async def estimate_pull(
        self, request: worker_pb2.EstimatePullRequest, *, timeout_seconds: float
    ) -> worker_pb2.EstimatePullResponse:
        """See `WorkerClient.estimate_pull`."""
        try:
            return await self._stub.EstimatePull(request, timeout=timeout_seconds)
        except grpc.RpcError as error:
            raise self._typed(error) from error

    async def _ready(self) -> None:
        if not await connected(self._channel):
            raise self._unreachable(await why_not_connected(self._channel))

    def _unreachable(self, why: KvloopError | None = None) -> UnavailableError:
        # Other texts hold addresses that are no caller's affair.
        detail = f": {why.message}" if isinstance(why, TlsError) else ""
        return UnavailableError(
            f"worker {self._worker_id} cannot be reached{detail}",
            reason=WORKER_UNREACHABLE,
            worker_id=self._worker_id,
        )

    def _typed(self, error: grpc.RpcError | UnavailableError) -> KvloopError:
        found = error if isinstance(error, UnavailableError) else from_rpc_error(error)
        if isinstance(found, TlsError):
            return self._unreachable(found)
        if isinstance(found, UnavailableError) and found.reason == found.default_reason:
            # From gRPC itself; its text holds addresses that are no caller's affair.
            return UnavailableError(
                f"the connection to worker {self._worker_id} broke",
                reason=WORKER_LOST,
                worker_id=self._worker_id,
            )
        return found


def _trace(request: worker_pb2.PrefillRequest | worker_pb2.DecodeRequest) -> None:
    """Write into a request to which trace it belongs."""
    context = trace_context()
    if context is not None:
        request.trace_context.CopyFrom(context)
