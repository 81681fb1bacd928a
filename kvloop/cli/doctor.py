"""`kvloop doctor`: what is wrong with a running stack and what to change."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from dataclasses import replace
from typing import Annotated

import typer

from kvloop.bench.transfers import HttpPrefillEngine
from kvloop.cli import options
from kvloop.cli.exits import FAILED
from kvloop.cli.served_model import choose_model
from kvloop.cli.tls import tls_of
from kvloop.client import DEFAULT_ROUTER, Client
from kvloop.doctor.collect import collect
from kvloop.doctor.examine import examine
from kvloop.doctor.facts import Probe
from kvloop.doctor.findings import Severity
from kvloop.doctor.probe import ProbePlan, RouterTalker, Talker, probe
from kvloop.doctor.report import as_json, as_text
from kvloop.inventory import DEFAULT_KVMETA


def doctor(
    context: typer.Context,
    run_probe: Annotated[
        bool,
        typer.Option("--probe", help="Measure pulls, with a few short conversations."),
    ] = False,
    probe_tokens: Annotated[int, typer.Option(min=1, help="Prompt tokens of a probe.")] = 4000,
    probe_answer_tokens: Annotated[
        int,
        typer.Option(
            min=1, help="Tokens it generates: all that is pulled where prefill cached the prompt."
        ),
    ] = 512,
    prefill_engine_url: Annotated[
        str,
        typer.Option(
            help="With --probe: vLLM server of the only prefill worker, to count the pieces in "
            "which pulls go."
        ),
    ] = "",
    worker: Annotated[
        list[str] | None,
        typer.Option(help="host:port of a sidecar that should be registered; may be repeated."),
    ] = None,
    tenant: Annotated[str, typer.Option(help="Whose conversations to look at.")] = "default",
    model: options.ServedModel = "",
    as_json_object: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    router: options.Router = DEFAULT_ROUTER,
    kvmeta: options.Kvmeta = DEFAULT_KVMETA,
) -> None:
    """Check a running stack, and say what to change.

    Looks at versions, block sizes and pairs that cannot exchange KV, side channels,
    TTLs and leases, clocks, orphans, and whether conversations reuse anything; and
    compares each pair's measured link with computing. --probe runs a few conversations
    and says what holds their pulls back: many small pieces, a fallback to TCP, a GPU
    that the peer does not see, a side channel that is out of reach.

    Exit status 1 if something is wrong.

    \b
    Examples:
      kvloop doctor
      kvloop doctor --probe --probe-tokens 16000
      kvloop doctor --probe --prefill-engine-url http://127.0.0.1:8100
      kvloop doctor --worker 10.0.0.5:7300 --json | jq .findings
    """
    tls = tls_of(context)
    shown = None
    if run_probe:
        with Client(router, tls=tls) as client:
            plan = ProbePlan(choose_model(client, model), probe_tokens, probe_answer_tokens)
            shown = _probe(RouterTalker(client, plan), plan, prefill_engine_url)
    facts = collect(
        router=router,
        kvmeta=kvmeta,
        sidecars=worker or (),
        tenant=tenant,
        tls=tls,
        wall_clock=time.time,
        probe=shown,
    )
    findings = examine(facts)
    sys.stdout.write((as_json if as_json_object else as_text)(facts, findings))
    if any(finding.severity is Severity.WRONG for finding in findings):
        raise typer.Exit(FAILED)


def _probe(talker: Talker, plan: ProbePlan, prefill_engine_url: str) -> Probe:
    """Run the conversations; with the engine's counts if it can be asked.

    Raises:
        KvloopError: a turn failed, or the engine cannot be reached.
    """
    if not prefill_engine_url:
        return probe(talker, plan, random.Random())
    engine = HttpPrefillEngine(prefill_engine_url)
    before = asyncio.run(engine.transfers())
    shown = probe(talker, plan, random.Random())
    # Its last turn pulls nothing: by its end the engine has counted the pulls before.
    return replace(shown, pulls=asyncio.run(engine.transfers()) - before)
