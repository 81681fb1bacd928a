"""`kvloop generate`: one completion."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvloop.cli import options
from kvloop.cli.exits import INTERRUPTED
from kvloop.cli.receipt_line import receipt_line
from kvloop.cli.served_model import choose_model
from kvloop.cli.tls import tls_of
from kvloop.client import DEFAULT_ROUTER, Client


def generate(
    context: typer.Context,
    prompt: Annotated[
        str, typer.Argument(help="The whole prompt; - or nothing reads standard input.")
    ] = "-",
    token_ids: Annotated[
        str, typer.Option(help="The prompt as token ids, separated by commas, in its place.")
    ] = "",
    model: options.ServedModel = "",
    conversation: options.ConversationId = "",
    max_tokens: options.MaxTokens = 128,
    temperature: options.Temperature = None,
    no_reuse: options.NoReuse = False,
    router: options.Router = DEFAULT_ROUTER,
) -> None:
    """Complete a prompt and print the answer as it comes.

    The answer goes to standard output, the receipt to standard error. In a
    conversation the prompt has to hold all earlier turns too.

    \b
    Examples:
      kvloop generate 'Once upon a time'
      kvloop generate --conversation c1 --max-tokens 40 < prompt.txt
      kvloop generate --token-ids 12,7,99 --temperature 0
    """
    given = _token_ids(token_ids) if token_ids else _text(prompt)
    with Client(router, tls=tls_of(context)) as client:
        answer = client.generate(
            given,
            model=choose_model(client, model),
            conversation_id=conversation,
            max_tokens=max_tokens,
            temperature=temperature,
            disable_reuse=no_reuse,
        )
        try:
            for chunk in answer:
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            raise typer.Exit(INTERRUPTED) from None
        sys.stdout.write("\n")
        sys.stderr.write(receipt_line(answer.collect().receipt) + "\n")


def _text(prompt: str) -> str:
    if prompt != "-":
        return prompt
    if sys.stdin.isatty():
        raise typer.BadParameter("give a prompt, or pipe one in")
    return sys.stdin.read()


def _token_ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter("token ids are numbers separated by commas") from error
