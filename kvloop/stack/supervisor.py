"""Starts a stack, watches it, and stops it."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from kvloop import rpc
from kvloop.aio import AsyncClient
from kvloop.errors import KvloopError
from kvloop.stack.certificates import StackCertificates, make_certificates
from kvloop.stack.child import Child
from kvloop.stack.errors import ProcessDiedError, ProcessNotReadyError
from kvloop.stack.logs import describe_phase
from kvloop.stack.plan import KVMETA, ROUTER, EntryPoints, plan_stack
from kvloop.stack.ports import PortPool
from kvloop.stack.readiness import is_serving, lists_model
from kvloop.stack.settings import StackSettings
from kvloop.stack.status import ProcessState, ProcessStatus
from kvloop.tls import TlsSource

_POLL_SECONDS = 0.1
_LISTING_TIMEOUT_SECONDS = 30.0
"""For the router to see workers that are ready."""


class Stack:
    """A ledger, a router and workers, running while the block runs.

    Entering starts everything and returns when a turn can be served: kvmeta
    first, then the router and all workers at once. Leaving stops everything in
    the opposite order and leaves no process, socket or temporary file behind;
    after an error a temporary run_dir is kept for its logs.

    Enter it from the main thread: the kernel ends the processes when the thread
    that started them ends.

    Args:
        settings: what the stack consists of.
        entry_points: how each service is started.
        on_change: called with the new status of a process.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        settings: StackSettings,
        *,
        entry_points: EntryPoints | None = None,
        on_change: Callable[[ProcessStatus], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.run_dir = settings.run_dir or Path()
        """Folder of logs, sockets and the database, once the stack was entered."""
        self.certificates: StackCertificates | None = None
        """Certificates of the services and of those who call them, if there are any."""
        self._tls: TlsSource | None = None
        self._entry_points = entry_points or EntryPoints()
        self._on_change = on_change or (lambda status: None)
        self._clock = clock
        self._children: dict[str, Child] = {}
        self._statuses: dict[str, ProcessStatus] = {}
        self._resources = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as resources:
            self.run_dir = resources.enter_context(_open_run_dir(self.settings))
            ports = resources.enter_context(PortPool())
            if self.settings.tls:
                self.certificates = make_certificates(self.run_dir / "tls")
                self._tls = self.certificates.client_tls()
            plan = plan_stack(
                self.settings, self._entry_points, ports, self.run_dir, self.certificates
            )
            stack_id = secrets.token_hex(8)
            for spec in plan.processes:
                self._children[spec.name] = Child(spec, stack_id, os.environ)
                self._set(ProcessStatus(spec.name, ProcessState.WAITING))
            resources.push_async_callback(self._stop_all)
            await self._start_all()
            self._resources = resources.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._resources.__aexit__(kind, error, traceback)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all processes, in the order in which they are started."""
        return tuple(self._children)

    @property
    def router_address(self) -> str:
        """host:port of the router."""
        return self.address(ROUTER)

    @property
    def gateway_url(self) -> str:
        """URL of the router's OpenAI-compatible HTTP server, without a path."""
        return self._children[ROUTER].spec.gateway_url

    @property
    def kvmeta_address(self) -> str:
        """host:port of kvmeta."""
        return self.address(KVMETA)

    def address(self, name: str) -> str:
        """host:port of a process's gRPC server."""
        return self._children[name].spec.address

    def engine_url(self, name: str) -> str:
        """URL of a worker's vLLM server."""
        return self._children[name].spec.engine_url

    def pid(self, name: str) -> int | None:
        """Id of a process; None if it is not running."""
        return self._children[name].pid

    def log_path(self, name: str) -> Path:
        """Log of a process."""
        return self._children[name].spec.log

    def engine_log_path(self, name: str) -> Path | None:
        """Log of a worker's vLLM server."""
        return self._children[name].spec.engine_log

    async def start(self, name: str) -> None:
        """Start a process that was stopped or killed; returns when it is in use again.

        Raises:
            ProcessDiedError: it ended while it was coming up.
            ProcessNotReadyError: it did not come up in time.
        """
        await self._start(name)
        await self._wait_listed()

    async def stop(self, name: str) -> None:
        """Stop a process in good order, with everything it started."""
        self._change(name, ProcessState.STOPPING)
        await self._children[name].end(self.settings.stop_timeout_seconds)
        self._change(name, ProcessState.STOPPED)

    def kill(self, name: str, signum: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a process alone, as a crash or an operator would.

        What the process started is not signalled. `start` and the end of the
        stack clear it away.
        """
        if signum not in (signal.SIGSTOP, signal.SIGCONT):
            self._change(name, ProcessState.STOPPING)
        self._children[name].send_signal(signum)

    def kill_all(self) -> None:
        """Kill everything at once, for people who cannot wait."""
        for child in self._children.values():
            child.kill_all()

    async def watch(self) -> NoReturn:
        """Wait until a process ends that nobody stopped or killed through this object.

        Raises:
            ProcessDiedError: one did.
        """
        while True:
            for child in self._children.values():
                self._check_alive(child)
            await asyncio.sleep(_POLL_SECONDS)

    async def _start_all(self) -> None:
        await self._start(KVMETA)
        try:
            async with asyncio.TaskGroup() as tasks:
                for name in self._children:
                    if name != KVMETA:
                        tasks.create_task(self._start(name), name=f"start {name}")
        except BaseExceptionGroup as group:
            # The first failure has cancelled the others; it is the one to tell.
            raise _first_error(group) from None
        await self._wait_listed()

    async def _start(self, name: str) -> None:
        child = self._children[name]
        await child.end(self.settings.stop_timeout_seconds)
        child.spawn()
        now = self._clock()
        self._set(ProcessStatus(name, ProcessState.STARTING, "", now, now))
        deadline = now + self.settings.start_timeout_seconds
        async with rpc.open_channel(child.spec.address, self._tls) as channel:
            while not await is_serving(channel):
                self._check_alive(child)
                self._report_phase(child)
                if self._clock() > deadline:
                    self._change(name, ProcessState.FAILED)
                    raise ProcessNotReadyError(
                        name,
                        f"was not ready after {self.settings.start_timeout_seconds:.0f} s",
                        child.spec.log,
                        child.last_lines(),
                    )
                await asyncio.sleep(_POLL_SECONDS)
        self._change(name, ProcessState.READY)

    async def _wait_listed(self) -> None:
        """Wait until the router offers the model with all workers that are ready."""
        ready = {n for n, s in self._statuses.items() if s.state is ProcessState.READY}
        if not {ROUTER, KVMETA} <= ready:
            return  # a test took one away
        prefill = sum(name.startswith("prefill-") for name in ready)
        decode = sum(name.startswith("decode-") for name in ready)
        deadline = self._clock() + _LISTING_TIMEOUT_SECONDS
        model = self.settings.model_name
        async with AsyncClient(self.router_address, tls=self._tls) as client:
            while not await lists_model(client, model, prefill, decode):
                for child in self._children.values():
                    self._check_alive(child)
                if self._clock() > deadline:
                    raise ProcessNotReadyError(
                        ROUTER,
                        f"does not list {prefill} prefill and {decode} decode workers of {model!r}",
                        self.log_path(ROUTER),
                        self._children[ROUTER].last_lines(),
                    )
                await asyncio.sleep(_POLL_SECONDS)

    async def _stop_all(self) -> None:
        """Router first, so that no turn comes in; kvmeta last, for the workers' farewell."""
        await self.stop(ROUTER)
        async with asyncio.TaskGroup() as tasks:
            for name in self._children:
                if name not in (ROUTER, KVMETA):
                    tasks.create_task(self.stop(name), name=f"stop {name}")
        await self.stop(KVMETA)

    def _check_alive(self, child: Child) -> None:
        try:
            child.check_alive()
        except ProcessDiedError:
            self._change(child.spec.name, ProcessState.FAILED)
            raise

    def _report_phase(self, child: Child) -> None:
        for line in child.log.new_lines():
            phase = describe_phase(line)
            status = self._statuses[child.spec.name]
            if phase is not None and phase != status.phase:
                self._set(replace(status, phase=phase))

    def _change(self, name: str, state: ProcessState) -> None:
        self._set(replace(self._statuses[name], state=state, changed_at=self._clock()))

    def _set(self, status: ProcessStatus) -> None:
        self._statuses[status.name] = status
        self._on_change(status)


@contextmanager
def _open_run_dir(settings: StackSettings) -> Iterator[Path]:
    if settings.run_dir is not None:
        path = settings.run_dir.resolve()
        path.mkdir(parents=True, exist_ok=True)
        yield path
        return
    path = Path(tempfile.mkdtemp(prefix="kvloop-"))
    keep = settings.keep_run_dir
    try:
        yield path
    except Exception:
        keep = True  # its logs say what went wrong
        raise
    finally:
        if not keep:
            shutil.rmtree(path)


def _first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    known = group.subgroup(KvloopError)
    return (known or group).exceptions[0]
