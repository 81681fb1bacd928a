"""`kvloop sim-engine`: the simulated vLLM server, a service of its own."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

import typer

from kvloop.errors import UnsupportedError


def sim_engine(context: typer.Context) -> None:
    """Run simulated vLLM servers, to plan capacity or to test clients and faults.

    Takes the flags of `python -m services.sim`; `kvloop sim-engine --help` lists
    them. docs/sim-engine.md says what is modelled and what is not.
    """
    if find_spec("services.sim") is None:
        raise UnsupportedError("the simulated engine is not installed: pip install 'kvloop[sim]'")
    os.execv(sys.executable, [sys.executable, "-m", "services.sim", *context.args])
