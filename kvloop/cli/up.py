"""`kvloop up`: a whole stack on this machine."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvloop.cli import options
from kvloop.cli.exits import INTERRUPTED
from kvloop.cli.interrupts import cancel_on_signal
from kvloop.cli.local_model import resolve_model
from kvloop.cli.progress import ProgressView
from kvloop.client import DEFAULT_ROUTER
from kvloop.inventory import DEFAULT_KVMETA
from kvloop.stack import EntryPoints, Stack, StackSettings, make_workers
from kvloop.stack.certificates import Part
from kvloop.stack.gpus import detect_gpus


def up(
    model: options.ModelPath = "",
    served_model_name: Annotated[
        str, typer.Option(help="Name that clients use.", show_default="last part of --model")
    ] = "",
    prefill: Annotated[int, typer.Option(min=1, help="Prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers.")] = 1,
    engine_args: options.EngineArgs = "",
    prefill_engine_args: Annotated[
        str, typer.Option(help="Further vLLM flags of prefill workers, quoted.")
    ] = "",
    decode_engine_args: Annotated[
        str, typer.Option(help="Further vLLM flags of decode workers, quoted.")
    ] = "",
    ttl: Annotated[
        int, typer.Option(min=1, help="Seconds that decode retains KV after a turn.")
    ] = 480,
    threshold: Annotated[
        int, typer.Option(min=0, help="Fewer tokens than this are recomputed, not pulled.")
    ] = 64,
    engine_python: Annotated[
        str, typer.Option(help="Python that has vLLM.", show_default="this one")
    ] = "",
    tls: Annotated[
        bool,
        typer.Option(
            "--tls", help="Mutual TLS on every hop, with certificates made for this stack."
        ),
    ] = False,
    run_dir: options.RunDir = "",
    keep: Annotated[bool, typer.Option("--keep", help="Keep the temporary folder.")] = False,
    start_timeout: options.StartTimeout = 600.0,
) -> None:
    """Run a ledger, a router, and prefill and decode workers on this machine.

    Shows how they come up, then their addresses. One Ctrl-C stops everything in
    good order and leaves nothing behind; a second one kills it. With NVIDIA GPUs
    the workers are spread over them.

    \b
    Examples:
      kvloop up
      kvloop up --model /models/qwen3-8b --prefill 2 --decode 2
      kvloop up --ttl 120 --engine-args '--max-model-len 8192'
    """
    try:
        workers = make_workers(
            prefill,
            decode,
            engine_args=engine_args,
            prefill_engine_args=prefill_engine_args,
            decode_engine_args=decode_engine_args,
            decoder_kv_blocks_ttl_seconds=ttl,
            kv_recompute_threshold=threshold,
        )
    except ValueError as error:
        raise typer.BadParameter(f"engine flags: {error}") from error
    settings = StackSettings(
        model=resolve_model(model),
        served_model_name=served_model_name,
        workers=workers,
        run_dir=Path(run_dir) if run_dir else None,
        keep_run_dir=keep,
        engine_python=engine_python,
        gpus=detect_gpus(),
        start_timeout_seconds=start_timeout,
        tls=tls,
    )
    raise typer.Exit(asyncio.run(run_stack(settings, EntryPoints(), Console())))


async def run_stack(settings: StackSettings, entry_points: EntryPoints, console: Console) -> int:
    """Run a stack until it is interrupted or breaks.

    Returns:
        The exit status.

    Raises:
        KvloopError: it did not come up, or a process died.
    """
    clock = time.monotonic
    began = clock()
    came_up = False
    with ProgressView(console, clock) as view:
        stack = Stack(settings, entry_points=entry_points, on_change=view.update, clock=clock)
        with cancel_on_signal(stack.kill_all) as interrupts:
            try:
                async with stack:
                    came_up = True
                    welcome = _welcome(stack, clock() - began)
                    console.print(welcome, markup=False, highlight=False, soft_wrap=True)
                    await stack.watch()
            except asyncio.CancelledError:
                if not interrupts.count:
                    raise
    return 0 if came_up else INTERRUPTED


def _client_files(stack: Stack) -> dict[str, Path]:
    """Variables by which commands find the certificates to call the stack with."""
    made = stack.certificates
    if made is None:
        return {}
    return {
        "KVLOOP_TLS_CA_FILE": made.authority,
        "KVLOOP_TLS_CERTIFICATE_FILE": made.certificate(Part.OPERATOR),
        "KVLOOP_TLS_KEY_FILE": made.key(Part.OPERATOR),
    }


def _welcome(stack: Stack, seconds: float) -> str:
    target = "" if stack.router_address == DEFAULT_ROUTER else f" --router {stack.router_address}"
    ledger = "" if stack.kvmeta_address == DEFAULT_KVMETA else f" --kvmeta {stack.kvmeta_address}"
    lines = [
        f"kvloop serves {stack.settings.model_name!r} after {seconds:.0f} s",
        "",
        *(f"  {name:<12} {stack.address(name)}" for name in stack.names),
        f"  {'OpenAI API':<12} {stack.gateway_url}/v1",
        f"  {'logs':<12} {stack.run_dir}",
        "",
        "Try this, in another terminal:",
        *(f"  export {name}={path}" for name, path in _client_files(stack).items()),
        f"  kvloop chat{target}",
        f"  kvloop conversations{ledger}",
        "",
        "Ctrl-C stops everything.",
    ]
    return "\n".join(lines)
