"""The files for Docker Compose have the form of its specification, and agree with the rest."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvloop.worker.v1 import worker_pb2
from services.kvmeta.settings import KvmetaSettings
from services.router.settings import RouterSettings
from services.worker.settings import WorkerSettings
from tests.unit.deploy.queries import ROOT

COMPOSE = ROOT / "docker-compose.yml"
FILES = (COMPOSE, ROOT / "docker-compose.debian.yml")
_MARGIN_SECONDS = 10.0


def _services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE.read_text())["services"]
    return found


def _of_role(role: str) -> set[str]:
    return {
        name
        for name, service in _services().items()
        if service.get("environment", {}).get("KVLOOP_WORKER_ROLE") == role
    }


def _against_the_specification(file: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", file],
        capture_output=True,
        text=True,
        timeout=25,
        check=False,
    )


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_compose_file_follows_the_specification(file: Path) -> None:
    checked = _against_the_specification(file)

    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_specification_knows_no_misspelt_key(tmp_path: Path) -> None:
    misspelt = tmp_path / "compose.yml"
    misspelt.write_text(COMPOSE.read_text().replace("    volumes:", "    volume:"))

    assert _against_the_specification(misspelt).returncode == 1


def test_every_engine_profile_has_both_roles_and_prometheus_looks_at_each() -> None:
    profiles = {
        role: {profile for name in _of_role(role) for profile in _services()[name]["profiles"]}
        for role in ("prefill", "decode")
    }
    scraped = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
    names = {
        job["job_name"]: {name for source in job["dns_sd_configs"] for name in source["names"]}
        for job in scraped["scrape_configs"]
    }

    assert profiles == {"prefill": {"sim", "cpu", "gpu"}, "decode": {"sim", "cpu", "gpu"}}
    assert names == {
        "router": {"router"},
        "kvmeta": {"kvmeta"},
        "worker": _of_role("prefill") | _of_role("decode"),
    }


def test_compose_waits_for_all_that_a_service_does_before_it_ends() -> None:
    def default(settings: Any, field: str) -> float:
        return float(settings.model_fields[field].default)

    router = 2 * default(RouterSettings, "shutdown_grace_seconds")
    kvmeta = default(KvmetaSettings, "shutdown_grace_seconds")
    worker = default(WorkerSettings, "grace_seconds") + default(
        WorkerSettings, "engine_stop_grace_seconds"
    )
    needed = dict.fromkeys(_of_role("prefill") | _of_role("decode"), worker)
    for name, seconds in {"router": router, "kvmeta": kvmeta, **needed}.items():
        service = _services()[name]
        (drain,) = (
            float(value)
            for variable, value in service["environment"].items()
            if variable.endswith("_DRAIN_SECONDS")
        )
        given = float(service["stop_grace_period"].removesuffix("s"))
        drains = 2 if name in _of_role("prefill") else 1
        assert given >= drains * drain + seconds + _MARGIN_SECONDS, name


def test_the_front_notices_a_router_that_leaves_before_it_has_left() -> None:
    config = (ROOT / "deploy" / "haproxy" / "haproxy.cfg").read_text()
    server = re.search(r"check inter (\d+)s fastinter \d+ms fall (\d+)", config)
    drain = float(_services()["router"]["environment"]["KVLOOP_ROUTER_DRAIN_SECONDS"])

    assert server is not None
    assert int(server[1]) * int(server[2]) < drain


def test_workers_are_healthy_once_they_are_ready_and_routers_before() -> None:
    """The front waits for routers, which may wait for engines to load for many minutes."""
    probed: dict[str, list[str]] = {}
    for file in sorted((ROOT / "deploy" / "docker").glob("*Dockerfile")):
        for port, service in re.findall(
            r'"services\.common\.probe", "127\.0\.0\.1:(\d+)"(?:, "--service", "([\w.]+)")?\]',
            file.read_text(),
        ):
            probed.setdefault(port, []).append(service)

    worker = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name
    assert probed == {"7100": [""], "7200": [""], "7300": [worker] * 3}


def test_no_image_is_taken_as_whatever_is_newest() -> None:
    for name, service in _services().items():
        image = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", service["image"])
        assert not image.endswith(":latest"), name
        assert ":" in image, name
