"""Random histories: all stores agree with each other and with the model."""

from __future__ import annotations

import asyncio
import functools
import itertools
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from services.kvmeta.model import EngineRef, HandleState
from services.kvmeta.rules import EngineGone, Repeated, Stored, Superseded
from services.kvmeta.store import Ended, Hit, Store, TtlNotHonoured
from tests.contract import kvmeta_stores
from tests.contract.kvmeta_model import ModelLedger
from tests.contract.kvmeta_stores import LEASE_US, POLICY, SECOND, START_US, ManualClock
from tests.contract.postgres_server import PostgresServer

NAMES = st.sampled_from(["a", "b"])
REQUESTS = st.sampled_from(["r1", "r2", "r3", "r4"])
WORKERS = st.sampled_from(["d1", "d2"])
TURNS = st.sampled_from([0, 0, 0, 1, 2, 3, 4, 5])
SELDOM = st.sampled_from([False, False, False, False, True])
TTLS = st.sampled_from([60, 100, 480])


class StoresAgree(RuleBasedStateMachine):
    """Does everything to every store and to the model."""

    server: PostgresServer | None = None

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.model = ModelLedger()
        self.held: dict[str, str] = {}
        self.turns = itertools.count()
        self.runner = asyncio.Runner()
        self.stack = AsyncExitStack()
        self.stores: list[Store] = self.runner.run(self._open())
        for worker in ("d1", "d2"):
            self._register(worker, "e1")

    async def _open(self) -> list[Store]:
        directory = self.stack.enter_context(tempfile.TemporaryDirectory())
        path = Path(directory) / "ledger.db"
        opened: list[Any] = [
            kvmeta_stores.open_memory(self.clock, POLICY),
            kvmeta_stores.open_sqlite_store(path, self.clock, POLICY),
        ]
        if self.server is not None:
            opened.append(kvmeta_stores.open_postgres_store(self.server.url, self.clock, POLICY))
        return [await self.stack.enter_async_context(each) for each in opened]

    def teardown(self) -> None:
        self.runner.run(self.stack.aclose())
        self.runner.close()

    def everywhere(self, call: Callable[[Store], Awaitable[Any]]) -> Any:
        """The one answer that all stores give."""

        async def ask() -> list[Any]:
            return [await call(store) for store in self.stores]

        first, *others = self.runner.run(ask())
        assert all(other == first for other in others), (first, others)
        return first

    @rule(name=NAMES, request=REQUESTS)
    def take(self, name: str, request: str) -> None:
        self._take(name, request)

    def _take(self, name: str, request: str) -> int:
        at = kvmeta_stores.key(name)
        outcome = self.everywhere(lambda store: store.take(at, request))
        if isinstance(outcome, Hit):
            handle = outcome.conversation.handle_id
            self.held[name] = handle
            assert outcome.params == handle.encode()
            assert self.model.take(name, request) == ("hit", outcome.turn, handle)
        else:
            expected = ("miss", outcome.turn, outcome.reason)
            assert self.model.take(name, request) == expected
        turn: int = outcome.turn
        return turn

    @rule(
        name=NAMES,
        request=REQUESTS,
        turn=TURNS,
        worker=WORKERS,
        other_life=SELDOM,
        engine_ttl=TTLS,
        retention=st.sampled_from([0, 480]),
    )
    def commit(
        self,
        name: str,
        request: str,
        turn: int,
        worker: str,
        other_life: bool,
        engine_ttl: int,
        retention: int,
    ) -> None:
        epoch = self.model.engines.get(worker, "e1")
        if other_life:
            epoch = "e1" if epoch == "e2" else "e2"
        self._commit(name, request, turn, worker, epoch, engine_ttl, retention)

    @rule(name=NAMES, worker=WORKERS, engine_ttl=TTLS, retention=st.sampled_from([0, 480, 480]))
    def whole_turn(self, name: str, worker: str, engine_ttl: int, retention: int) -> None:
        """What most turns do, so that most histories have handles to act on."""
        if worker not in self.model.engines:
            self._register(worker, "e1")
        request = f"t{next(self.turns)}"
        turn = self._take(name, request)
        epoch = self.model.engines[worker]
        self._commit(name, request, turn, worker, epoch, engine_ttl, retention)

    def _commit(
        self,
        name: str,
        request: str,
        turn: int,
        worker: str,
        epoch: str,
        engine_ttl: int,
        retention: int,
    ) -> None:
        handle = f"{name}-{request}-{self.model.now}"
        wanted = kvmeta_stores.commit(
            kvmeta_stores.key(name),
            turn=turn,
            request_id=request,
            worker_id=worker,
            engine=EngineRef(worker, epoch),
            params=handle.encode(),
            engine_ttl_seconds=engine_ttl,
            retention_seconds=retention,
        )
        verdict = self.everywhere(lambda store: store.commit(wanted, handle))
        expected = self.model.commit(name, request, turn, worker, epoch, engine_ttl, retention)
        match verdict:
            case Stored(row, _):
                assert expected == ("stored", row.handle_id, row.turn)
            case Repeated(row):
                assert expected == ("repeated", row.handle_id)
            case Superseded():
                assert expected == ("superseded",)
            case EngineGone():
                assert expected == ("engine gone",)

    @rule(name=NAMES, request=REQUESTS)
    def give_back(self, name: str, request: str) -> None:
        handle = self.held.get(name, "none")
        at = kvmeta_stores.key(name)
        revision = self.everywhere(lambda store: store.give_back(at, handle, request))
        assert self.model.give_back(name, handle, request) == (revision is not None)

    @rule(name=NAMES, really=SELDOM)
    def end(self, name: str, really: bool) -> None:
        if not really:
            return
        ended = self.everywhere(lambda store: store.end(kvmeta_stores.key(name)))
        assert ended == Ended(*self.model.end(name))

    @rule(name=NAMES, ttl=st.sampled_from([1, 30, 90, 475, 900, 4000]))
    def extend(self, name: str, ttl: int) -> None:
        at = kvmeta_stores.key(name)
        outcome = self.everywhere(lambda store: store.extend(at, ttl * SECOND))
        expected = self.model.extend(name, ttl)
        if outcome is None:
            assert expected == "unknown"
        elif isinstance(outcome, TtlNotHonoured):
            assert expected == "too long"
        else:
            assert expected == "set"

    @rule(
        name=NAMES,
        remaining=st.sampled_from([0, 30, 60, 480]),
        moved=st.sampled_from([-20, 0, 20, 55]),
        comes_back=st.booleans(),
    )
    def renew(self, name: str, remaining: int, moved: int, comes_back: bool) -> None:
        pin = self._pin(name)
        if pin is None:
            return
        request, worker, epoch, extension = pin
        if comes_back and self.model.engines.get(worker) != epoch:
            self._register(worker, epoch)  # as a sidecar whose lease had ended
        self._renew(request, worker, epoch, remaining, max(0, extension + moved))

    @rule(request=REQUESTS, worker=WORKERS)
    def renew_anything(self, request: str, worker: str) -> None:
        self._renew(request, worker, self.model.engines.get(worker, "e1"), 60, 20)

    def _renew(self, request: str, worker: str, epoch: str, remaining: int, extension: int) -> None:
        engine = EngineRef(worker, epoch)
        pins = [kvmeta_stores.held(request, remaining=remaining, extension=extension)]
        checked = self.everywhere(lambda store: store.check_pins(worker, engine, pins))
        expected = self.model.renew(request, worker, epoch, remaining, extension)
        if isinstance(checked, EngineGone):
            assert expected == ("engine gone",)
        else:
            [status] = checked.statuses
            assert expected == (status.verdict.value, status.wanted_for_us // SECOND)

    @rule(name=NAMES, others=st.lists(REQUESTS, max_size=2, unique=True))
    def evict(self, name: str, others: list[str]) -> None:
        pin = self._pin(name)
        if pin is None:
            return
        request, worker, epoch, _ = pin
        requests = [request, *(other for other in others if other != request)]
        engine = EngineRef(worker, epoch)
        evicted = self.everywhere(lambda store: store.evict(worker, engine, requests))
        assert evicted == self.model.evict(requests, worker, epoch)

    def _pin(self, name: str) -> tuple[str, str, str, int] | None:
        """What the engine that holds a conversation's blocks would report."""
        known = self.model.conversations.get(name)
        handle = known.handle if known else None
        return (handle.by, handle.worker, handle.epoch, handle.extension) if handle else None

    @rule(worker=WORKERS, other_life=SELDOM)
    def register(self, worker: str, other_life: bool) -> None:
        epoch = self.model.engines.get(worker, "e1")
        if other_life:
            epoch = "e1" if epoch == "e2" else "e2"
        self._register(worker, epoch)

    def _register(self, worker: str, epoch: str) -> None:
        made = kvmeta_stores.worker(worker, engine=EngineRef(worker, epoch))
        lease = f"{worker}-{self.model.now}"
        voided = self.everywhere(lambda store: store.register(made, lease, LEASE_US))
        assert voided == self.model.register(worker, epoch)

    @rule(worker=WORKERS, really=SELDOM)
    def end_lease(self, worker: str, really: bool) -> None:
        if not really:
            return
        _, records = self.everywhere(lambda store: store.registry())
        leases = [each.lease_id for each in records if each.worker.worker_id == worker]
        for lease in leases:
            ended = self.everywhere(functools.partial(_end_lease, lease=lease))
            assert ended == worker
        self.model.end_lease(worker)

    @rule(seconds=st.sampled_from([1, 24, 25, 30, 55, 95, 475, 3600]))
    def pass_time(self, seconds: int) -> None:
        self.clock.advance(seconds)
        self.model.now += seconds
        # Leases are not what is tested here.
        self.everywhere(lambda store: store.extend_leases())

    @rule()
    def sweep(self) -> None:
        self.everywhere(lambda store: store.sweep(100))
        self.model.sweep()

    @invariant()
    def rows_and_releases_are_the_models(self) -> None:
        rows, releases = self.everywhere(_look)
        for name, row in zip(("a", "b"), rows, strict=True):
            known = self.model.conversations.get(name)
            handle = known.handle if known else None
            assert (row is None) == (handle is None)
            if row is not None and known is not None and handle is not None:
                assert row.state == HandleState(handle.state)
                assert (row.turn, row.issued_turn) == (handle.turn, known.opened)
                assert row.expire_time_us == START_US + handle.until * SECOND
                assert row.drop_time_us == START_US + handle.drop * SECOND
                assert row.deadline_extension_us == handle.extension * SECOND
        named = [(release.handle.handle_id, release.cause.value) for release in releases]
        assert named == sorted(self.model.released)
        assert all(each.handle.params == each.handle.handle_id.encode() for each in releases)


async def _end_lease(store: Store, *, lease: str) -> str | None:
    return await store.end_lease(lease)


async def _look(store: Store) -> tuple[list[Any], list[Any]]:
    rows = [await store.get(kvmeta_stores.key(name)) for name in ("a", "b")]
    found: list[Any] = []
    for worker in ("d1", "d2"):
        releases = await store.releases(worker, 0, 1000)
        assert isinstance(releases, list)
        found += releases
    assert len({release.revision for release in found}) == len(found)
    # Several handles may be released by one call, in any order.
    unordered = [replace(release, revision=0) for release in found]
    return rows, sorted(unordered, key=lambda each: (each.handle.handle_id, each.cause))


@pytest.mark.timeout(180)  # random histories take as long as they take on a busy machine
def test_all_stores_agree_with_each_other_and_with_the_model(optional_postgres) -> None:
    StoresAgree.server = optional_postgres
    run_state_machine_as_test(
        StoresAgree,
        settings=settings(
            max_examples=40,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
