"""An engine is ready when it answers, serves the model, and its connector is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import structlog

from kvloop.errors import PreconditionError, UnavailableError
from services.worker.engine import EngineModel
from services.worker.event_hub import EventHub
from services.worker.event_messages import Hello
from services.worker.metrics import WorkerMetrics
from services.worker.readiness import until_ready, watch_health, watch_process
from tests.unit.worker.fakes import FakeClock, FakeEngine, FakeLink, hello


class _Process:
    """An engine process whose life is scripted."""

    def __init__(self) -> None:
        self.exit_status: int | None = None
        self.ended = asyncio.Event()
        self.lines: list[list[str]] = []

    async def wait(self) -> int:
        await self.ended.wait()
        return self.exit_status or 0

    def new_lines(self) -> list[str]:
        return self.lines.pop(0) if self.lines else []

    def last_lines(self) -> str:
        return "ValueError: no such model"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def hub(clock: FakeClock) -> EventHub:
    return EventHub(clock, WorkerMetrics())


@pytest.fixture
def ready(
    clock: FakeClock, engine: FakeEngine, hub: EventHub
) -> Callable[..., asyncio.Future[tuple[EngineModel, Hello]]]:
    def start(
        process: _Process | None = None, model_name: str | None = None
    ) -> asyncio.Future[tuple[EngineModel, Hello]]:
        return asyncio.ensure_future(
            until_ready(
                engine,
                hub,
                process,
                clock,
                model_name=model_name,
                start_timeout_seconds=60,
                hello_timeout_seconds=20,
            )
        )

    return start


async def test_ready_once_it_answers_and_its_connector_is_there(ready, engine, hub, clock) -> None:
    healthy_at = clock.now + 5
    engine.is_healthy = lambda: clock.now >= healthy_at
    waiting = ready(_Process())
    for _ in range(30):
        await asyncio.sleep(0)
    assert healthy_at < clock.now < healthy_at + 20
    assert not waiting.done()
    hub.connected(hello(), FakeLink())
    assert await waiting == (EngineModel("tiny", 4096), hello())


async def test_a_hello_that_comes_before_the_engine_answers_counts(
    ready, engine, hub, clock
) -> None:
    hub.connected(hello(), FakeLink())
    healthy_at = clock.now + 2
    engine.is_healthy = lambda: clock.now >= healthy_at
    assert (await ready())[1] == hello()


async def test_progress_is_logged_by_phase_with_seconds(ready, engine, hub, clock) -> None:
    process = _Process()
    process.lines = [["Starting to load model x"], [], ["Loading weights took 3 s"]]
    hub.connected(hello(), FakeLink())
    healthy_at = clock.now + 1
    engine.is_healthy = lambda: clock.now >= healthy_at
    with structlog.testing.capture_logs() as logs:
        await ready(process)
    loading = [entry for entry in logs if entry["event"] == "engine_loading"]
    assert [entry["phase"] for entry in loading] == ["loading weights", "profiling and compiling"]
    assert [entry["seconds"] for entry in loading] == [0.0, 0.5]
    assert logs[-1]["event"] == "engine_ready"


async def test_a_long_phase_is_reported_again(ready, engine, hub, clock) -> None:
    hub.connected(hello(), FakeLink())
    healthy_at = clock.now + 35
    engine.is_healthy = lambda: clock.now >= healthy_at
    with structlog.testing.capture_logs() as logs:
        await ready(_Process())
    assert [entry["event"] for entry in logs].count("engine_loading") == 3


async def test_an_engine_that_dies_while_loading_is_reported_with_its_last_words(
    ready, engine
) -> None:
    process = _Process()
    process.exit_status = 1
    engine.is_healthy = lambda: False
    with pytest.raises(UnavailableError, match="no such model") as caught:
        await ready(process)
    assert caught.value.reason == "ENGINE_DIED"
    assert caught.value.metadata["exit_status"] == "1"


@pytest.mark.parametrize("process", [None, _Process])
async def test_an_engine_that_never_answers_is_given_up(ready, engine, process) -> None:
    engine.is_healthy = lambda: False
    with pytest.raises(UnavailableError, match="60 s") as caught:
        await ready(process() if process else None)
    assert caught.value.reason == "ENGINE_START_TIMEOUT"


async def test_without_a_hello_the_cause_is_named(ready) -> None:
    with pytest.raises(PreconditionError, match="KVLOOP_EVENTS_SOCKET") as caught:
        await ready()
    assert caught.value.reason == "CONNECTOR_NOT_LOADED"
    assert "KvloopConnector" in caught.value.message


async def test_the_model_asked_for_must_be_served(ready, engine, hub) -> None:
    hub.connected(hello(), FakeLink())
    engine.served = [EngineModel("other", 1), EngineModel("tiny", 2)]
    assert (await ready(model_name="tiny"))[0] == EngineModel("tiny", 2)
    with pytest.raises(PreconditionError, match="other, tiny") as caught:
        await ready(model_name="absent")
    assert caught.value.reason == "MODEL_NOT_SERVED"


async def test_the_end_of_the_process_is_noticed() -> None:
    process = _Process()
    watching = asyncio.ensure_future(watch_process(process))
    await asyncio.sleep(0)
    process.exit_status = 137
    process.ended.set()
    with pytest.raises(UnavailableError, match="exit status 137"):
        await watching


async def test_an_attached_engine_is_lost_after_several_failed_checks(engine, clock) -> None:
    answers = [True, False, False, True, False, False, False]
    engine.is_healthy = lambda: answers.pop(0)
    with pytest.raises(UnavailableError) as caught:
        await watch_health(engine, clock, poll_seconds=2)
    assert caught.value.reason == "ENGINE_DIED"
    assert answers == []
    assert clock.slept == [2] * 7
