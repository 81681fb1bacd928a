"""A decode engine of two tensor-parallel ranks, in one process and on one set clock.

Scheduler half, worker halves and the aggregation of what the ranks report are the
version's own code; NIXL, memory and model are stand-ins. Steps are scheduled ahead of
their execution, as vLLM does.
"""

from __future__ import annotations

import collections
import importlib
import time
import types
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import MagicMock

from tests.versions.stand_ins import make_connector, make_scheduler_output

IN_FLIGHT = 2
"""Steps that vLLM schedules at most before it processes the first one's output, with
one pipeline stage and asynchronous scheduling."""


class SetClock:
    """Replaces time.perf_counter, vLLM's clock for deadlines."""

    def __init__(self) -> None:
        self.now = 1000.0
        time.perf_counter = lambda: self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


class Rank:
    """The worker half of the connector on one rank."""

    def __init__(self) -> None:
        from services.worker.connector import KvloopConnector

        self.worker = _make_worker()
        self.notifications: list[bytes] = []
        self.worker.nixl_wrapper.get_new_notifs = self._take_notifications
        self.connector = KvloopConnector.__new__(KvloopConnector)
        self.connector.connector_worker = self.worker
        self.connector.connector_scheduler = None
        self.connector.kv_transfer_config = types.SimpleNamespace(kv_role="kv_consumer")
        self.connector._connector_metadata = None
        self.connector._on_cpu = False
        self.connector._build_worker_half()

    def execute(self, metadata: Any) -> Any:
        """One step, as the version's model runners have it; returns what the rank reports."""
        from vllm.v1.worker import kv_connector_model_runner_mixin as runner

        runner.get_kv_transfer_group = lambda: self.connector
        runner.get_forward_context = lambda: None
        output = types.SimpleNamespace(
            kv_connector_metadata=metadata, finished_req_ids=set(), has_sync_kv_loads=False
        )
        step = runner.KVConnectorModelRunnerMixin._get_kv_connector_output(output)
        with step as reported:
            pass  # no forward pass
        return reported

    def _take_notifications(self) -> dict[str, list[bytes]]:
        taken, self.notifications = self.notifications, []
        return {"reader": taken} if taken else {}


class Engine:
    """Scheduler half and ranks of one decode engine."""

    def __init__(self, ranks: int = 2) -> None:
        from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator

        self.connector = make_connector(
            "kv_consumer", "engine-d", parallel={"tensor_parallel_size": ranks}
        )
        self.ranks = [Rank() for _ in range(ranks)]
        self._aggregator = KVOutputAggregator(ranks)
        self._in_flight: collections.deque[Any] = collections.deque()

    def schedule(self, tokens: int = 0) -> None:
        """Schedule a step that computes so many tokens, of no request in particular."""
        assert len(self._in_flight) < IN_FLIGHT
        output = make_scheduler_output(tokens)
        self._in_flight.append(self.connector.build_connector_meta(output))

    def execute(self, before_rank: Mapping[int, Callable[[], None]] | None = None) -> set[str]:
        """Execute the oldest scheduled step and process its output.

        Args:
            before_rank: called before the rank of that number executes.

        Returns:
            Requests whose blocks the scheduler frees now.
        """
        metadata = self._in_flight.popleft()
        outputs = []
        for number, rank in enumerate(self.ranks):
            if before_rank and number in before_rank:
                before_rank[number]()
            outputs.append(types.SimpleNamespace(kv_connector_output=rank.execute(metadata)))
        output = self._aggregator.aggregate(outputs).kv_connector_output
        self.connector.update_connector_output(output)
        return set(output.finished_sending or ())

    def step(self, count: int = 1) -> set[str]:
        """Whole steps, one after the other; returns what is freed."""
        freed: set[str] = set()
        for _ in range(count):
            self.schedule()
            freed |= self.execute()
        return freed


def _make_worker() -> Any:
    """The version's worker class with nothing behind it but what deadlines need."""
    base = worker_class()

    class Worker(base):  # type: ignore[misc,valid-type]
        def __init__(self) -> None:
            self._reqs_to_send: dict[str, float] = {}
            self._reqs_to_process: set[str] = set()
            self.consumer_notification_counts_by_req: dict[str, int] = collections.defaultdict(int)
            self.expected_consumer_notifications_by_req: dict[str, int] = {}
            self._recving_transfers: dict[str, list[int]] = {}
            self._recving_metadata: dict[str, Any] = {}
            self._failed_recv_reqs: Any = _EmptyQueue()
            self._recv_failures: set[str] = set()
            self.world_size = 1
            self.pcp_rank = 0
            self.transfer_topo = MagicMock(tp_ratio=lambda _: 1)
            self.nixl_wrapper = MagicMock(check_xfer_state=lambda handle: self.state_of(handle))
            self.state_of: Callable[[int], str] = lambda _: "DONE"

        def __getattr__(self, name: str) -> Any:
            # Methods that the version's class lacks are none of this.
            if name.startswith("_reap"):
                raise AttributeError(name)
            return MagicMock()

        def __del__(self) -> None:
            pass

    return Worker()


class _EmptyQueue(set[str]):
    """A queue in some versions, a set in others; empty in all."""

    def empty(self) -> bool:
        return True


def worker_class() -> Any:
    """The class of the worker half that reads, in this version."""
    nixl = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
    try:
        return importlib.import_module(f"{nixl}.pull_worker").NixlPullConnectorWorker
    except ModuleNotFoundError:
        return importlib.import_module(f"{nixl}.worker").NixlConnectorWorker
