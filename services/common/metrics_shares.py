"""One set of metrics for several processes of one service.

Each process shows its own on a Unix socket, in a folder that all of them know. Whoever
is asked, reads all sockets there and tells the samples apart by the label `process`.
So every kind of metric works as in a single process, and a process that was started
anew counts from zero, as Prometheus expects.
"""

from __future__ import annotations

import os
import socket
import socketserver
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

LABEL = "process"
_SUFFIX = ".metrics"
_ANSWER_SECONDS = 2.0
_END = b"# EOF\n"
"""Ends a whole answer. A process that dies while it answers would cut a number."""
_LONGEST_SOCKET_PATH = 107  # bytes, Linux


class FolderTooLongError(OSError):
    """The path of a folder leaves no room for the sockets in it."""


def check_folder(folder: Path, processes: int) -> None:
    """See that so many processes can have their sockets in a folder.

    Raises:
        FolderTooLongError: they cannot.
    """
    size = len(os.fsencode(_socket_path(folder, processes - 1)))
    if size > _LONGEST_SOCKET_PATH:
        raise FolderTooLongError(
            f"the path of {folder} is too long for sockets in it by "
            f"{size - _LONGEST_SOCKET_PATH} bytes; set TMPDIR to a shorter one"
        )


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True  # one who asks and does not read must not hold up our end


@contextmanager
def share(registry: CollectorRegistry, folder: Path, number: int) -> Iterator[None]:
    """Show a process's metrics to the others while the block runs, from a thread of its own.

    Args:
        registry: what to show.
        folder: the same for all processes; only their user may enter it.
        number: of this process.
    """
    path = _socket_path(folder, number)
    path.unlink(missing_ok=True)  # of a process before this one, which died

    class _Answer(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):  # whoever asked has gone
                self.request.sendall(generate_latest(registry) + _END)

    with _Server(str(path), _Answer) as server:
        thread = Thread(target=server.serve_forever, name="share metrics")
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
            path.unlink(missing_ok=True)


def of_all(folder: Path, *, clock: Callable[[], float] = time.monotonic) -> CollectorRegistry:
    """What all processes show, with the label `process`. To be asked from a thread.

    Args:
        folder: where their sockets are.
        clock: seconds on a clock that never goes back.
    """
    registry = CollectorRegistry()
    registry.register(_SharedMetrics(folder, clock))
    return registry


class _SharedMetrics(Collector):
    def __init__(self, folder: Path, clock: Callable[[], float]) -> None:
        self._folder = folder
        self._clock = clock

    def describe(self) -> Iterable[Metric]:
        """Nothing: names are known when the processes are asked."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Ask all processes now; one that does not answer in time is left out."""
        found: dict[str, Metric] = {}
        paths = sorted(self._folder.glob(f"*{_SUFFIX}"))
        deadline = self._clock() + _ANSWER_SECONDS
        with ThreadPoolExecutor(max_workers=len(paths) or 1) as threads:
            answers = list(threads.map(lambda path: self._ask(path, deadline), paths))
        for path, answer in zip(paths, answers, strict=True):
            for family in text_string_to_metric_families(answer):
                known = found.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                number = path.name.removesuffix(_SUFFIX)
                known.samples += [_of_process(sample, number) for sample in family.samples]
        return found.values()

    def _ask(self, path: Path, deadline: float) -> str:
        """A process's answer; nothing if it does not come whole by the deadline."""
        answer = bytearray()
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asked:
                asked.settimeout(_ANSWER_SECONDS)
                asked.connect(str(path))
                while piece := asked.recv(1 << 16):
                    answer += piece
                    asked.settimeout(max(deadline - self._clock(), 0.0))
        except OSError:  # it has just ended, or hangs
            return ""
        return answer.decode() if answer.endswith(_END) else ""


def _socket_path(folder: Path, number: int) -> Path:
    return folder / f"{number}{_SUFFIX}"


def _of_process(sample: Sample, number: str) -> Sample:
    return sample._replace(labels={**sample.labels, LABEL: number})
