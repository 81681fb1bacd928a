"""The pinned lists are complete, agree with each other, and are what runs here."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[3]


def _pins(name: str) -> dict[str, str]:
    pins: dict[str, str] = {}
    for line in (ROOT / "requirements" / name).read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        requirement = Requirement(line)
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", line
        pins[canonicalize_name(requirement.name)] = specifier.version
    return pins


def _project_requirements(*extras: str) -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(line) for line in project["dependencies"]]
    for extra in extras:
        for line in project["optional-dependencies"][extra]:
            requirement = Requirement(line)
            if requirement.name == "kvloop":
                wanted += _project_requirements(*requirement.extras)
            else:
                wanted.append(requirement)
    return wanted


def _closure(requirements: list[Requirement]) -> Iterator[tuple[str, Requirement]]:
    """Every requirement that follows, with the canonical name of what it asks for."""
    seen: set[tuple[str, frozenset[str]]] = set()
    while requirements:
        requirement = requirements.pop()
        name = canonicalize_name(requirement.name)
        yield name, requirement
        key = (name, frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        try:
            lines = distribution(name).requires or []
        except PackageNotFoundError:
            pytest.fail(f"{name} is not installed")
        for line in lines:
            inner = Requirement(line)
            extras = requirement.extras or {""}
            if inner.marker is None or any(
                inner.marker.evaluate({"extra": extra}) for extra in extras
            ):
                requirements.append(inner)


@pytest.mark.parametrize(
    ("extras", "files"),
    [
        (("router", "kvmeta", "postgres", "worker", "sim", "tracing"), ("kvloop.txt",)),
        # The engine brings numpy and pillow; its list is always installed along.
        (("dev",), ("kvloop.txt", "dev.txt", "engine-cpu.txt")),
    ],
)
def test_lists_cover_what_the_project_asks_for(
    extras: tuple[str, ...], files: tuple[str, ...]
) -> None:
    pins: dict[str, str] = {}
    for file in files:
        pins |= _pins(file)
    for name, requirement in _closure(_project_requirements(*extras)):
        assert name in pins, f"{name} is not pinned in {' or '.join(files)}"
        assert requirement.specifier.contains(pins[name], prereleases=True), str(requirement)


def test_no_list_contradicts_another() -> None:
    names = ("engine-cpu.txt", "kvloop.txt", "dev.txt")
    lists = [_pins(name) for name in names]
    for first in lists:
        for second in lists:
            shared = first.keys() & second.keys()
            assert {n: first[n] for n in shared} == {n: second[n] for n in shared}


def test_build_requirements_are_pinned() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    pins = _pins("kvloop.txt") | _pins("dev.txt")
    for requirement in map(Requirement, build):
        version = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(Version(version), prereleases=True)


def test_torch_has_no_local_version_and_its_companions_stay_out() -> None:
    pins = _pins("engine-cpu.txt")
    assert "+" not in pins["torch"]
    assert not pins.keys() & {"torchvision", "torchaudio", "torchcodec"}
