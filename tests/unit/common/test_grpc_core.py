"""Services import gRPC with the choice made, and leave it to nobody else."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from services.common.grpc_core import CHOICE, VARIABLE, chosen

_SEEN = f"""
import importlib, os, sys
seen = []
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "grpc":
            seen.append(os.environ.get({VARIABLE!r}))
sys.meta_path.insert(0, Finder())
importlib.import_module(sys.argv[1])
print(seen, os.environ.get({VARIABLE!r}))
"""
_CALL = """
import services.common.grpc_core, grpc
with grpc.insecure_channel("127.0.0.1:1") as channel:
    try:
        channel.unary_unary("/a/b")(b"", timeout=5)
    except grpc.RpcError as error:
        print(error.code().name)
"""


def _python(code: str, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != VARIABLE}
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        env=environ | variables,
        capture_output=True,
        text=True,
        check=True,
        timeout=25,
    )


@pytest.mark.parametrize(
    "module",
    [
        "services.kvmeta.__main__",
        "services.worker.__main__",
        "services.router.__main__",
        "services.router.processes",  # all that each of several processes starts with
    ],
)
def test_what_serves_imports_grpc_by_way_of_the_choice(module: str) -> None:
    assert _python(_SEEN, module).stdout.strip() == f"[{CHOICE!r}] None"


def test_an_operators_own_choice_holds() -> None:
    said = _python(_SEEN, "services.router.__main__", **{VARIABLE: ""}).stdout
    assert said.strip() == "['']"


def test_grpc_still_knows_what_is_chosen() -> None:
    called = _python(_CALL)
    assert called.stdout.strip() == "UNAVAILABLE"
    assert called.stderr == ""


def test_the_choice_stands_no_longer_than_needed() -> None:
    environ: dict[str, str] = {}
    with chosen(environ):
        assert environ == {VARIABLE: CHOICE}
    assert environ == {}
