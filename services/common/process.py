"""What every service process does: logging, signals, one task group."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

import msgspec
import structlog
from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliApp

from kvloop.errors import KvloopError
from services.common import event_loop, tracing

_log = structlog.get_logger(__name__)

S = TypeVar("S", bound=BaseSettings)


def load_settings(kind: type[S]) -> S:
    """Settings from flags and environment.

    Exits with status 2 if they are wrong, after one line for each problem.
    """
    try:
        return CliApp.run(kind)
    except ValidationError as error:
        for problem in error.errors():
            where = "".join(f"--{str(part).replace('_', '-')}: " for part in problem["loc"])
            sys.stderr.write(f"{where}{problem['msg']}\n")
        sys.exit(2)


def setup_logging(*, level: str, json: bool) -> None:
    """Log events to stderr, as JSON lines or for people.

    Each event is one write with its newline: processes that share a stderr, as a
    router's do, never join two events on a line.
    """
    renderer: structlog.types.Processor = (
        structlog.processors.JSONRenderer(_to_json)
        if json
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            name_trace,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def _to_json(event: structlog.types.EventDict, **_: object) -> str:
    """As fast as can be: a router writes a line for each turn."""
    return msgspec.json.encode(event, enc_hook=repr).decode()


def name_trace(
    logger: object, method: str, event: structlog.types.EventDict
) -> structlog.types.EventDict:
    """Give a log entry the trace in which it is written; none where nothing is traced."""
    trace_id = tracing.current().trace_id
    if trace_id:
        event["trace_id"] = trace_id
    return event


def run_service(name: str, serve: Callable[[asyncio.Event], Awaitable[None]]) -> int:
    """Run `serve(stop)` until SIGTERM or SIGINT; the exit status.

    1 if it failed for a reason outside of the process, logged as `<name>_failed`.
    """
    status = 0
    try:
        event_loop.run(run_until_signal(serve))
    except* (KvloopError, OSError) as failures:
        for failure in failures.exceptions:
            reason = getattr(failure, "reason", type(failure).__name__)
            _log.error(f"{name}_failed", reason=reason, error=str(failure))
        status = 1
    return status


async def run_until_signal(serve: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Run `serve(stop)` with `stop` set on SIGTERM or SIGINT.

    A second signal does not cut the shutdown short; SIGKILL does. SIGHUP is for
    `reload_on_hangup` and ends nothing.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    loop.add_signal_handler(signal.SIGHUP, _nothing_to_reload)
    await serve(stop)


@contextmanager
def reload_on_hangup(reload: Callable[[], None]) -> Iterator[None]:
    """Call `reload` on each SIGHUP while the block runs. For asyncio's main thread."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, reload)
    try:
        yield
    finally:
        loop.add_signal_handler(signal.SIGHUP, _nothing_to_reload)


class Reloadable(Protocol):
    """Something that was read from files which may have been replaced."""

    def reload(self) -> None:
        """Read them again."""
        ...


def reload_all(*parts: Reloadable | None) -> None:
    """Reload those that there are."""
    for part in parts:
        if part is not None:
            part.reload()


def _nothing_to_reload() -> None:
    _log.info("nothing_to_reload")
