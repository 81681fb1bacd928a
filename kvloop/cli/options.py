"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Router = Annotated[
    str, typer.Option("--router", envvar="KVLOOP_ROUTER", help="host:port of the router.")
]
Kvmeta = Annotated[
    str, typer.Option("--kvmeta", envvar="KVLOOP_KVMETA", help="host:port of kvmeta.")
]
ServedModel = Annotated[
    str,
    typer.Option(
        "--model",
        envvar="KVLOOP_MODEL",
        help="Served model name; may be left out where only one is served.",
    ),
]
ConversationId = Annotated[
    str, typer.Option("--conversation", help="Conversation to take part in.")
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", help="Tokens to generate at most.")]
Temperature = Annotated[
    float | None,
    typer.Option("--temperature", help="0 is greedy.", show_default="the engine's"),
]
NoReuse = Annotated[
    bool, typer.Option("--no-reuse", help="Recompute everything; leave retained KV alone.")
]
ModelPath = Annotated[
    str,
    typer.Option(
        "--model",
        envvar="KVLOOP_MODEL_PATH",
        help="Model folder or hub name. Without it, a tiny random model is made.",
        show_default=False,
    ),
]
RunDir = Annotated[
    str,
    typer.Option(
        "--run-dir",
        help="Folder for logs, sockets and the ledger; kept at the end.",
        show_default="a temporary one",
    ),
]
StartTimeout = Annotated[
    float, typer.Option("--start-timeout", help="Seconds for one process to come up.")
]
EngineArgs = Annotated[
    str, typer.Option("--engine-args", help="Further vLLM flags of all workers, quoted.")
]
