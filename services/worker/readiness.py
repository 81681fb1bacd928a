"""Waits until an engine can serve, and notices when it no longer can."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, Protocol

import structlog

from kvloop.errors import PreconditionError, UnavailableError
from services.worker.clock import Clock
from services.worker.engine import Engine, EngineModel
from services.worker.event_hub import EventHub
from services.worker.event_messages import Hello
from services.worker.loading import Progress

_log = structlog.get_logger(__name__)

_POLL_SECONDS = 0.25
_STILL_LOADING_SECONDS = 10.0
_FAILURES_UNTIL_LOST = 3


class StartedEngine(Protocol):
    """An engine process that the sidecar has started."""

    @property
    def exit_status(self) -> int | None:
        """None while it runs."""

    async def wait(self) -> int:
        """Wait for its end."""

    def new_lines(self) -> list[str]:
        """What it has logged since the last call."""

    def last_lines(self) -> str:
        """The end of its log."""


async def until_ready(
    engine: Engine,
    hub: EventHub,
    process: StartedEngine | None,
    clock: Clock,
    *,
    model_name: str | None,
    start_timeout_seconds: float,
    hello_timeout_seconds: float,
) -> tuple[EngineModel, Hello]:
    """Wait until the engine answers and its connector has said hello.

    Progress is logged as `engine_loading`, with the phase and the seconds since
    the start.

    Args:
        engine: the engine.
        hub: where its connector reports.
        process: the engine's process; None if the sidecar attaches to it.
        clock: measures the timeouts.
        model_name: model that must be served; None takes the first.
        start_timeout_seconds: for the engine to answer.
        hello_timeout_seconds: for the hello after that.

    Returns:
        The model it serves, and what its connector said.

    Raises:
        UnavailableError: ENGINE_DIED or ENGINE_START_TIMEOUT.
        PreconditionError: CONNECTOR_NOT_LOADED or MODEL_NOT_SERVED.
    """
    started = clock.monotonic()
    report = _LoadingReport(process, clock, started)
    while not await engine.healthy():
        report.update()
        if clock.monotonic() - started > start_timeout_seconds:
            raise UnavailableError(
                f"the engine does not answer after {start_timeout_seconds:.0f} s"
                + (f"; the end of its log:\n{process.last_lines()}" if process else ""),
                reason="ENGINE_START_TIMEOUT",
            )
        await clock.sleep(_POLL_SECONDS)
    model = _choose(await engine.models(), model_name)
    answered = clock.monotonic()
    while hub.identity is None:
        report.update()
        if clock.monotonic() - answered > hello_timeout_seconds:
            raise PreconditionError(
                f"the engine answers, but its connector has not connected to the event socket "
                f"for {hello_timeout_seconds:.0f} s: either the engine runs without kv_connector="
                "KvloopConnector and kv_connector_module_path=services.worker.connector, or "
                "KVLOOP_EVENTS_SOCKET in its environment does not lead to this sidecar's socket",
                reason="CONNECTOR_NOT_LOADED",
            )
        await clock.sleep(_POLL_SECONDS)
    _log.info("engine_ready", model=model.name, seconds=round(clock.monotonic() - started, 1))
    return model, hub.identity


async def watch_process(process: StartedEngine) -> NoReturn:
    """Raise when the engine's process ends.

    Raises:
        UnavailableError: ENGINE_DIED.
    """
    raise _died(await process.wait(), process)


async def watch_health(engine: Engine, clock: Clock, *, poll_seconds: float) -> NoReturn:
    """Raise when an attached engine no longer answers.

    Raises:
        UnavailableError: ENGINE_DIED, after several checks in a row have failed.
    """
    failures = 0
    while failures < _FAILURES_UNTIL_LOST:
        await clock.sleep(poll_seconds)
        failures = 0 if await engine.healthy() else failures + 1
    raise UnavailableError("the attached engine no longer answers", reason="ENGINE_DIED")


class _LoadingReport:
    """Logs what the engine's log says about its loading."""

    def __init__(self, process: StartedEngine | None, clock: Clock, started: float) -> None:
        self._process = process
        self._clock = clock
        self._started = started
        self._progress = Progress()
        self._logged_at = started

    def update(self) -> None:
        """Log progress, if there is any; raise if the process has ended."""
        if self._process is None:
            self._report_waiting()
            return
        if (status := self._process.exit_status) is not None:
            raise _died(status, self._process)
        advanced = [self._progress.read(line) for line in self._process.new_lines()]
        now = self._clock.monotonic()
        if any(advanced) or now - self._logged_at > _STILL_LOADING_SECONDS:
            self._logged_at = now
            _log.info(
                "engine_loading",
                phase=self._progress.phase,
                percent=self._progress.percent,
                seconds=round(now - self._started, 1),
            )

    def _report_waiting(self) -> None:
        """For an attached engine, whose log is somewhere else."""
        now = self._clock.monotonic()
        if now - self._logged_at > _STILL_LOADING_SECONDS:
            self._logged_at = now
            _log.info("waiting_for_engine", seconds=round(now - self._started, 1))


def _died(status: int, process: StartedEngine) -> UnavailableError:
    return UnavailableError(
        f"the engine ended with exit status {status}; the end of its log:\n{process.last_lines()}",
        reason="ENGINE_DIED",
        exit_status=status,
    )


def _choose(models: Sequence[EngineModel], name: str | None) -> EngineModel:
    for model in models:
        if name is None or model.name == name:
            return model
    served = ", ".join(model.name for model in models) or "none"
    raise PreconditionError(
        f"the engine does not serve {name!r}; it serves: {served}", reason="MODEL_NOT_SERVED"
    )
