"""`kvloop top`: what a router does, live."""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.live import Live

from kvloop.cli.tls import tls_of
from kvloop.top.feed import looks
from kvloop.top.screen import screen

DEFAULT_GATEWAY = "http://127.0.0.1:7180"


def top(
    context: typer.Context,
    gateway: Annotated[
        str, typer.Option("--gateway", envvar="KVLOOP_GATEWAY", help="URL of a router's gateway.")
    ] = DEFAULT_GATEWAY,
    api_key: Annotated[
        str, typer.Option("--api-key", envvar="KVLOOP_API_KEY", help="Key, where one is asked for.")
    ] = "",
    once: Annotated[bool, typer.Option("--once", help="Print the picture once, and end.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per look, with all figures.")
    ] = False,
) -> None:
    """Watch a router: workers, the last turns and what they reused, conversations.

    The same is on the status page of the gateway, under /ui. Turns and figures are
    those of that one router process; workers and conversations are everybody's.

    \b
    Examples:
      kvloop top
      kvloop top --once
      kvloop top --gateway https://kvloop.example --json | jq .workers
    """
    console = Console()
    with Live(console=console, screen=not once and not as_json, auto_refresh=False) as live:
        for parts in looks(gateway, api_key=api_key, tls=tls_of(context)):
            if as_json:
                sys.stdout.write(msgspec.json.encode(parts).decode() + "\n")
                sys.stdout.flush()
            else:
                height = 1000 if once else console.height
                live.update(screen(parts, height=height), refresh=True)
            if once:
                return
