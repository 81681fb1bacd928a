"""One set of metrics for several processes of one service.

Each process shows its own on a Unix socket, in a folder that all of them know. Whoever
is asked, reads all sockets there and tells the samples apart by the label `process`.
So every kind of metric works as in a single process, and a process that was started
anew counts from zero, as Prometheus expects.
"""

from __future__ import annotations

import socket
import socketserver
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

LABEL = "process"
_SUFFIX = ".metrics"
_ANSWER_SECONDS = 2.0


@contextmanager
def share(registry: CollectorRegistry, folder: Path, number: int) -> Iterator[None]:
    """Show a process's metrics to the others while the block runs, from a thread of its own.

    Args:
        registry: what to show.
        folder: the same for all processes; only their user may enter it.
        number: of this process.
    """
    path = folder / f"{number}{_SUFFIX}"
    path.unlink(missing_ok=True)  # of a process before this one, which died

    class _Answer(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.sendall(generate_latest(registry))

    with socketserver.ThreadingUnixStreamServer(str(path), _Answer) as server:
        thread = Thread(target=server.serve_forever, name="share metrics")
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
            path.unlink(missing_ok=True)


def of_all(folder: Path) -> CollectorRegistry:
    """What all processes show, with the label `process`. To be asked from a thread.

    Args:
        folder: where their sockets are.
    """
    registry = CollectorRegistry()
    registry.register(_SharedMetrics(folder))
    return registry


class _SharedMetrics(Collector):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def describe(self) -> Iterable[Metric]:
        """Nothing: names are known when the processes are asked."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Ask every process now; one that does not answer is left out."""
        found: dict[str, Metric] = {}
        for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
            for family in text_string_to_metric_families(_ask(path)):
                known = found.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                number = path.name.removesuffix(_SUFFIX)
                known.samples += [_of_process(sample, number) for sample in family.samples]
        return found.values()


def _of_process(sample: Sample, number: str) -> Sample:
    return sample._replace(labels={**sample.labels, LABEL: number})


def _ask(path: Path) -> str:
    pieces: list[bytes] = []
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asked:
            asked.settimeout(_ANSWER_SECONDS)
            asked.connect(str(path))
            while piece := asked.recv(1 << 16):
                pieces.append(piece)
    except OSError:  # it has just ended, or hangs
        return ""
    return b"".join(pieces).decode()
