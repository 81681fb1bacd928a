"""The command `kvloop`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

import typer

from kvloop.cli import bench, chat, demo, doctor, generate, pins, sim_engine, tables, top, up
from kvloop.cli.exits import exit_status, explain
from kvloop.cli.tls import tls_options
from kvloop.errors import KvloopError

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="""\
    Multi-turn generation on prefill/decode-disaggregated vLLM, with the KV of
    earlier turns reused.

    \b
    Start here:
      kvloop up                      a whole stack on this machine
      kvloop chat                    talk to it, in another terminal
      kvloop demo                    what reuse gains, measured here
      kvloop bench ttft              the same on any running stack, in depth
      kvloop top                     what a router does, live
      kvloop doctor                  what is wrong with a running stack

    \b
    Exit status:
      0    done
      1    a turn or a process failed, or the demo's check did
      2    wrong usage, or a value was refused (the message names the field)
      3    a service cannot be reached, or did not answer in time
      130  interrupted
    """,
)
app.callback()(tls_options)
app.command("up")(up.up)
app.command("demo")(demo.demo)
app.add_typer(bench.app, name="bench")
app.command("chat")(chat.chat)
app.command("generate")(generate.generate)
app.command("conversations")(tables.conversations)
app.command("workers")(tables.workers)
app.command("pins")(pins.pins)
app.command("top")(top.top)
app.command("doctor")(doctor.doctor)
app.command(
    "sim-engine",
    # --help too is for the simulated engine to answer.
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)(sim_engine.sim_engine)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command; failures end in plain words and an exit status."""
    try:
        app(args=arguments)
    except KvloopError as error:
        sys.stderr.write(explain(error) + "\n")
        sys.exit(exit_status(error))
    sys.exit(0)
