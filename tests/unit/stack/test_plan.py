"""Flags, ports, GPUs and log lines: everything that starts no process."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kvloop.stack import EntryPoints, StackSettings, WorkerSettings, make_workers
from kvloop.stack.certificates import StackCertificates
from kvloop.stack.gpus import detect_gpus, place
from kvloop.stack.logs import LogFollower, describe_phase, last_lines, readable
from kvloop.stack.plan import StackPlan, plan_stack
from kvloop.stack.ports import PortPool

RUN_DIR = Path("/run/kvloop")


def _plan(settings: StackSettings) -> StackPlan:
    with PortPool() as ports:
        return plan_stack(settings, EntryPoints(("K",), ("R",), ("W",)), ports, RUN_DIR)


def _flags(argv: tuple[str, ...]) -> dict[str, str]:
    return dict(argument.split("=", 1) for argument in argv if "=" in argument)


def test_worker_gets_every_flag_that_its_engine_needs() -> None:
    worker = WorkerSettings(
        role="prefill",
        engine_args="--no-enable-prefix-caching --served-model-name 'a b'",
        args=("--log-level=debug",),
        env={"X": "1"},
        decoder_kv_blocks_ttl_seconds=20,
        kv_recompute_threshold=8,
    )
    plan = _plan(
        StackSettings(model="/models/tiny/", workers=(worker, WorkerSettings(role="decode")))
    )
    prefill = plan.workers[0]
    flags = _flags(prefill.argv)
    assert flags["--role"] == "prefill"
    assert flags["--worker-id"] == prefill.name == "prefill-0"
    assert flags["--listen"] == flags["--advertise"] == prefill.address
    assert flags["--kvmeta"] == plan.kvmeta.address
    assert (flags["--model"], flags["--served-model-name"]) == ("/models/tiny/", "tiny")
    assert prefill.engine_url == f"http://127.0.0.1:{flags['--engine-port']}"
    assert flags["--events-socket"] == "/run/kvloop/prefill-0.sock"
    assert flags["--engine-log"] == "/run/kvloop/prefill-0.engine.log"
    assert flags["--decoder-kv-blocks-ttl-seconds"] == "20"
    assert flags["--kv-recompute-threshold"] == "8"
    assert flags["--engine-args"] == "--no-enable-prefix-caching --served-model-name 'a b'"
    assert prefill.argv[-1] == "--log-level=debug"
    assert prefill.env["X"] == "1"


def test_router_gets_its_gateway() -> None:
    router = _plan(StackSettings(model="m")).router
    listen = router.argv[router.argv.index("--gateway-listen") + 1]
    assert router.gateway_url == f"http://{listen}"
    assert listen != router.address


def test_with_certificates_every_service_knows_who_it_is_and_who_may_call_it() -> None:
    made = StackCertificates(Path("/certs"))
    with PortPool() as ports:
        plan = plan_stack(
            StackSettings(model="m"), EntryPoints(("K",), ("R",), ("W",)), ports, RUN_DIR, made
        )
    kvmeta, router, worker = (_flags(p.argv) for p in (plan.kvmeta, plan.router, plan.workers[0]))
    for part, flags in (("kvmeta", kvmeta), ("router", router), ("worker", worker)):
        assert flags["--tls-certificate-file"] == f"/certs/{part}.pem"
        assert flags["--tls-key-file"] == f"/certs/{part}.key"
        assert flags["--tls-client-ca-file"] == "/certs/ca.pem"
    assert kvmeta["--tls-allowed-clients"] == "router.kvloop,worker.kvloop,operator.kvloop"
    assert worker["--tls-allowed-clients"] == "router.kvloop,operator.kvloop"
    assert worker["--peer-tls-kvmeta-name"] == router["--peer-tls-kvmeta-name"] == "kvmeta.kvloop"
    assert router["--peer-tls-worker-name"] == "worker.kvloop"
    assert plan.router.gateway_url.startswith("https://")


def test_no_two_processes_share_a_port() -> None:
    plan = _plan(StackSettings(model="m", workers=make_workers(3, 3)))
    ports = [process.address for process in plan.processes]
    for worker in plan.workers:
        flags = _flags(worker.argv)
        ports += [f"127.0.0.1:{flags[name]}" for name in ("--engine-port", "--side-channel-port")]
    assert len(set(ports)) == len(ports) == 2 + 6 * 3


def test_workers_are_numbered_within_their_role() -> None:
    plan = _plan(StackSettings(model="m", workers=make_workers(2, 1)))
    assert [worker.name for worker in plan.workers] == ["prefill-0", "prefill-1", "decode-0"]


def test_flags_of_one_role_stay_with_it() -> None:
    workers = make_workers(1, 1, engine_args="--all", prefill_engine_args="--only-prefill")
    assert [worker.engine_args for worker in workers] == ["--all --only-prefill", "--all"]


@pytest.mark.parametrize(("prefill", "decode"), [(0, 1), (1, 0)])
def test_stack_without_a_role_is_refused(prefill: int, decode: int) -> None:
    with pytest.raises(ValueError, match="at least one prefill and one decode"):
        make_workers(prefill, decode)


def test_open_quote_in_engine_flags_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="quot"):
        WorkerSettings(role="decode", engine_args="--x 'y")


def test_port_in_use_is_passed_over() -> None:
    with socket.socket() as busy, PortPool() as ports:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        assert ports.take(port) != port


def test_port_held_by_another_stack_is_passed_over_until_it_lets_go() -> None:
    with PortPool() as mine:
        with PortPool() as other:
            held = other.take(21_000)
            assert mine.take(held) > held
        with PortPool() as third:
            assert third.take(held) == held


def test_each_worker_sees_all_gpus_its_own_first() -> None:
    assert place(1, 2, ("0", "1")) == ({"CUDA_VISIBLE_DEVICES": "1,0"}, [])
    assert place(0, 2, ()) == ({}, [])


def test_workers_on_one_gpu_share_its_memory() -> None:
    assert place(1, 2, ("0",)) == (
        {"CUDA_VISIBLE_DEVICES": "0"},
        ["--gpu-memory-utilization", "0.45"],
    )
    assert place(1, 3, ("0", "1"))[1] == []
    assert place(2, 3, ("0", "1"))[1] == ["--gpu-memory-utilization", "0.45"]


def test_own_memory_share_comes_after_ours() -> None:
    settings = StackSettings(
        model="m", workers=make_workers(engine_args="--gpu-memory-utilization 0.3"), gpus=("0",)
    )
    given = _flags(_plan(settings).workers[0].argv)["--engine-args"]
    assert given == "--gpu-memory-utilization 0.45 --gpu-memory-utilization 0.3"


def test_visible_gpus_are_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert detect_gpus() == ("2", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert detect_gpus() == ()


@pytest.mark.parametrize(
    ("line", "phase"),
    [
        ('{"event":"engine_starting","level":"info"}', "engine starting"),
        ('{"event":"engine_loading","phase":"loading","percent":null}', "loading"),
        ('{"event":"engine_loading","phase":"loading","percent":40}', "loading 40 %"),
        ("Traceback (most recent call last):", None),
        ('{"no":"event"}', None),
        ("{broken", None),
    ],
)
def test_phase_comes_from_structured_log_lines(line: str, phase: str | None) -> None:
    assert describe_phase(line) == phase


def test_log_line_becomes_readable() -> None:
    line = '{"event":"turn_failed","level":"error","timestamp":"x","turn":3,"exception":"T\\nE"}'
    assert readable(line) == "turn_failed turn=3\nT\nE"
    assert readable("plain") == "plain"


def test_follower_gives_whole_lines_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    follower = LogFollower(path)
    assert list(follower.new_lines()) == []
    path.write_text("old\n")
    follower.skip()
    with path.open("a") as log:
        log.write("one\ntw")
        log.flush()
        assert list(follower.new_lines()) == ["one"]
        log.write("o\n")
    assert list(follower.new_lines()) == ["two"]


def test_last_lines_count_lines_of_tracebacks_too(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text('first\n{"event":"e","exception":"a\\nb"}\n')
    assert last_lines(path, 2) == ["a", "b"]
    assert last_lines(tmp_path / "none", 2) == []
