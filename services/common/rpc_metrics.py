"""How long a server's calls take, and how they end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from prometheus_client import CollectorRegistry, Histogram

from services.common.series import Series

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_ROUNDED_UP = 0.01
"""Part of a call's time by which gRPC may round it up where it is sent."""
_NAMES: dict[int, str] = {code.value[0]: code.name for code in grpc.StatusCode}


class RpcMetrics:
    """Durations of the calls of one server, on the registry given.

    A stream counts from its start to its end; a watch, when its client leaves.

    Args:
        registry: where Prometheus finds them.
        clock: seconds on a clock that never goes back.
    """

    def __init__(
        self, registry: CollectorRegistry, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = clock
        self._seconds = Series(
            Histogram(
                "kvloop_rpc_seconds",
                "Duration of gRPC calls that this process answered; streams from their start to "
                "their end.",
                ["method", "code"],
                registry=registry,
                buckets=_SECONDS,
            )
        )

    @contextmanager
    def call(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> Iterator[None]:
        """Time a call while the block runs.

        Args:
            method: full name, as in /package.Service/Method.
            context: of the call; it has the status of one that was aborted.
        """
        started = self._clock()
        given = context.time_remaining()
        code = "OK"
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            code = _why_cancelled(context, given)
            raise
        except grpc.aio.AbortError:
            code = _status_name(context.code())
            raise
        finally:
            seconds = self._clock() - started
            self._seconds.of(method.rpartition("/")[2], code).observe(seconds)


def _why_cancelled(context: grpc.aio.ServicerContext[Any, Any], given: float | None) -> str:
    """gRPC cancels the handler both when the client leaves and when time is up.

    Time is up at the client first: on the way here it was rounded up.
    """
    left = context.time_remaining()
    if given is not None and left is not None and left <= given * _ROUNDED_UP:
        return grpc.StatusCode.DEADLINE_EXCEEDED.name
    return grpc.StatusCode.CANCELLED.name


def _status_name(code: grpc.StatusCode | int) -> str:
    """The context gives the number where it was set by number."""
    return code.name if isinstance(code, grpc.StatusCode) else _NAMES[code]
