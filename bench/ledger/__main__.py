"""Measures the ledger through gRPC and prints tables."""

from __future__ import annotations

from typing import Annotated

import typer

from bench.ledger import pairs as pairs_of
from bench.ledger import sweep as sweep_of
from bench.ledger.report import describe_machine
from bench.ledger.stores import Kind

app = typer.Typer(add_completion=False, help="How fast the ledger is, through gRPC.")

KINDS: tuple[Kind, ...] = ("memory", "sqlite", "postgres")
Stores = Annotated[list[str], typer.Option(help="memory, sqlite, postgres")]
Concurrency = Annotated[int, typer.Option(min=1, help="turns at once")]
ParamsBytes = Annotated[int, typer.Option(min=1, help="transfer params of each turn")]


@app.command()
def pairs(
    stores: Stores = list(KINDS),  # noqa: B006  (typer reads it)
    rows: Annotated[list[int], typer.Option(min=1, help="conversations")] = [  # noqa: B006
        1_000,
        1_000_000,
    ],
    seconds: Annotated[float, typer.Option(min=0.1, help="length of a round")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="rounds per store and size")] = 7,
    concurrency: Concurrency = 32,
    params_bytes: ParamsBytes = 1_000,
) -> None:
    """Take and commit: how many pairs per second, and how long each takes."""
    describe_machine()
    pairs_of.run(pairs_of.Plan(_kinds(stores), rows, seconds, rounds, concurrency, params_bytes))


@app.command()
def sweep(
    stores: Stores = ["sqlite", "postgres"],  # noqa: B006
    due: Annotated[int, typer.Option(min=1, help="handles that expire at once")] = 100_000,
    after: Annotated[float, typer.Option(help="seconds from the filling until they do")] = 20,
    repetitions: Annotated[int, typer.Option(min=1, help="per store")] = 3,
    concurrency: Concurrency = 8,
    params_bytes: ParamsBytes = 1_000,
) -> None:
    """Takes while a great many handles expire at once."""
    kinds = _kinds(stores)
    if "memory" in kinds:
        raise typer.BadParameter("memory cannot be filled with handles that are due")
    describe_machine()
    sweep_of.run(sweep_of.Plan(kinds, due, after, repetitions, concurrency, params_bytes))


def _kinds(names: list[str]) -> list[Kind]:
    unknown = set(names) - set(KINDS)
    if unknown:
        raise typer.BadParameter(f"no such store: {', '.join(sorted(unknown))}")
    return [kind for kind in KINDS if kind in names]


if __name__ == "__main__":
    app()
