"""The stack of docker-compose.yml, as a person would run it, under a name of its own."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from tests.compose.commands import docker, run, succeeds
from tests.compose.waiting import until
from tests.free_ports import held_port

_log = logging.getLogger(__name__)

ROOT = Path(__file__).parents[2]
PROJECT = "kvloop-compose-test"
OWN_BASE_IMAGE = "kvloop-base:bookworm"
"""Made from Debian's packages, unless the environment names another."""
BASE_IMAGE = os.environ.get("KVLOOP_BASE_IMAGE", OWN_BASE_IMAGE)
_FILES = ("docker-compose.yml", "docker-compose.debian.yml")
_FROM_PACKAGES = ("postgres", "front", "prometheus")
"""Services whose images have nothing in common with kvloop's own."""
_ROUTER_IS_READY = (
    *("python", "-m", "services.common.probe", "127.0.0.1:7100"),
    *("--service", "kvloop.router.v1.RouterService"),
)
"""What its own check does not ask: whether it has workers."""
_BUILD_SECONDS = 1500.0
_STOP_SECONDS = 240.0
_READY_SECONDS = 180.0


@dataclass
class Stack:
    """One running stack. `engines` are the services of its profile."""

    profile: str
    prefill: str
    decode: str
    healthy_seconds: float = 300.0
    """How long engines may take to start."""
    http_port: int = field(default_factory=held_port)
    grpc_port: int = field(default_factory=held_port)
    prometheus_port: int = field(default_factory=held_port)

    def compose(self, *arguments: str, seconds: float = 300) -> str:
        """Run docker-compose on this stack."""
        program = (
            ["docker", "compose"]
            if succeeds("docker", "compose", "version")
            else ["docker-compose"]
        )
        files = [part for name in _FILES for part in ("--file", str(ROOT / name))]
        environment = {
            "KVLOOP_BASE_IMAGE": BASE_IMAGE,
            "KVLOOP_HTTP_PORT": str(self.http_port),
            "KVLOOP_GRPC_PORT": str(self.grpc_port),
            "KVLOOP_PROMETHEUS_PORT": str(self.prometheus_port),
            # So slow that a pull is worth it on any machine: see services/worker/pull_plan.py.
            "KVLOOP_SIM_PREFILL_TOKENS_PER_SECOND": "400",
            "KVLOOP_WORKER_PULL_GUARD": "false",
            # While the database is away nothing is renewed, and it may be so for minutes.
            "KVLOOP_SIM_PIN_LEASE_SECONDS": "300",
            # So that a busy machine does not look like an outage.
            "KVLOOP_ROUTER_LEDGER_TIMEOUT_SECONDS": "5",
            "KVLOOP_WORKER_EVENT_TIMEOUT_SECONDS": "10",
            "KVLOOP_WORKER_COMMIT_TIMEOUT_SECONDS": "10",
            # The builder that every Docker has.
            "DOCKER_BUILDKIT": "0",
            "COMPOSE_DOCKER_CLI_BUILD": "0",
        }
        command = [*program, "--project-name", PROJECT, *files, "--profile", self.profile]
        return run([*command, *arguments], seconds=seconds, environment=environment)

    def build(self, *services: str) -> None:
        """Build the images of some services: kvloop's and the packages' side by side.

        Images of one kind have stages in common, which the standard builder finds
        built only if it comes to them one after the other.
        """
        _log.info("building images, about two minutes the first time (cpu: four)")
        packaged = [each for each in services if each in _FROM_PACKAGES]
        own = [each for each in services if each not in _FROM_PACKAGES]
        with ThreadPoolExecutor() as pool:
            builds = [
                pool.submit(self.compose, "build", *kind, seconds=_BUILD_SECONDS)
                for kind in (own, packaged)
            ]
        for build in builds:
            build.result()

    def up(self, *services: str, scale: Sequence[str] = ()) -> None:
        """Start services and wait until all are healthy."""
        _log.info("starting %s", ", ".join(services))
        scales = [part for each in scale for part in ("--scale", each)]
        self.compose("up", "--detach", "--no-build", *scales, *services, seconds=300)
        self.until_healthy()

    def down(self) -> None:
        """Remove containers, networks and volumes; images stay, as a cache."""
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "1", seconds=180)

    def containers(self, service: str = "") -> list[str]:
        """Ids of the containers of a service, or of all."""
        labels = [f"label=com.docker.compose.project={PROJECT}"]
        if service:
            labels.append(f"label=com.docker.compose.service={service}")
        filters = [part for label in labels for part in ("--filter", label)]
        return docker("ps", "--all", "--quiet", "--no-trunc", *filters).split()

    def health(self) -> dict[str, str]:
        """Health of each container that has a check, by name."""
        found = json.loads(docker("inspect", *self.containers()))
        return {
            each["Name"].strip("/"): each["State"]["Health"]["Status"]
            for each in found
            if each["State"].get("Health")
        }

    def until_healthy(self) -> None:
        """Wait until every container is healthy."""
        if not until(lambda: set(self.health().values()) == {"healthy"}, self.healthy_seconds):
            pytest.fail(f"not healthy: {self.health()}\n{self.logs()}", pytrace=False)

    def logs(self, lines: int = 30) -> str:
        """The last lines of every container."""
        return "\n".join(
            f"--- {container[:12]}\n{docker('logs', '--tail', str(lines), container)}"
            for container in self.containers()
        )

    def ready(self, container: str) -> bool:
        """Whether a container passes its own health check now, and a router takes turns.

        Docker looks every few seconds and says so later.
        """
        if container in self.containers("router"):
            return succeeds("docker", "exec", container, *_ROUTER_IS_READY)
        check = json.loads(docker("inspect", "--format", "{{json .Config.Healthcheck}}", container))
        kind, *command = check["Test"]
        if kind == "CMD-SHELL":
            command = ["sh", "-c", *command]
        return succeeds("docker", "exec", container, *command)

    def until_ready(self, *containers: str) -> None:
        """Wait until some containers pass their health checks."""
        for container in containers:
            if not until(partial(self.ready, container), _READY_SECONDS):
                pytest.fail(f"not ready: {container}\n{self.logs()}", pytrace=False)

    def restart(self, container: str) -> None:
        """Stop a container as Docker does, start it, and wait until it is ready."""
        docker("restart", container, seconds=_STOP_SECONDS)
        self.until_ready(container)

    @contextmanager
    def scaled(self, service: str, replicas: int) -> Iterator[list[str]]:
        """Start further containers beside those of a service for the time of the block.

        Yields their ids, of containers that may still be starting. Afterwards they are
        stopped as Docker does, and removed.
        """
        before = self.containers(service)

        def scale(number: int) -> None:
            options = ("--detach", "--no-build", "--no-deps", "--no-recreate")
            self.compose("up", *options, "--scale", f"{service}={number}", service)

        try:
            scale(replicas)
            yield [each for each in self.containers(service) if each not in before]
        finally:
            scale(len(before))

    @contextmanager
    def killed(self, *containers: str) -> Iterator[None]:
        """Kill containers for the time of the block; afterwards they are ready again."""
        docker("kill", *containers)
        try:
            yield
        finally:
            docker("start", *containers)
            self.until_ready(*containers)

    def counted(self, container: str, port: int, name: str, label: str = "") -> float:
        """A counter of a container now, summed up over its series.

        Args:
            container: its id.
            port: of its metrics.
            name: of the counter.
            label: only series with this part in their line.
        """
        url = f"http://127.0.0.1:{port}/metrics"
        code = f"import urllib.request; print(urllib.request.urlopen({url!r}).read().decode())"
        lines = self.python(container, code).splitlines()
        series = [line for line in lines if line.startswith(name) and label in line]
        return sum(float(line.split()[-1]) for line in series)

    def python(self, container: str, code: str) -> str:
        """What a line of Python prints in a container."""
        return docker("exec", container, "python3", "-c", code)
