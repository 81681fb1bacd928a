"""`kvloop chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from kvloop.cli import options
from kvloop.cli.exits import explain
from kvloop.cli.receipt_line import receipt_line
from kvloop.cli.served_model import choose_model
from kvloop.cli.tls import tls_of
from kvloop.client import DEFAULT_ROUTER, Client
from kvloop.errors import KvloopError
from kvloop.messages import Message
from kvloop.requests import Sampling

_HELP = "/end  end the conversation and start a new one   /quit  leave   /help  this"


class ChatSession:
    """One conversation at a time, its history, and what is printed of it.

    Args:
        client: of the router.
        model: served model name.
        conversation_id: "" makes one up, and ends it when it is left.
        system: system message; "" for none.
        sampling: sampling parameters of every turn.
        disable_reuse: recompute everything.
    """

    def __init__(
        self,
        client: Client,
        model: str,
        *,
        conversation_id: str,
        system: str,
        sampling: Sampling,
        disable_reuse: bool,
    ) -> None:
        self._client = client
        self._model = model
        self._system = system
        self._sampling = sampling
        self._disable_reuse = disable_reuse
        self._own_id = not conversation_id
        self.conversation_id = conversation_id or _new_id()
        self.history: list[Message | Mapping[str, Any]] = []
        self._turns = 0
        self._begin()

    def say(self, text: str) -> None:
        """Take one turn and print the answer as it comes.

        A turn that fails or is interrupted leaves no trace in the history.
        """
        messages = [*self.history, Message("user", text)]
        answer = self._client.chat(
            messages,
            model=self._model,
            conversation_id=self.conversation_id,
            disable_reuse=self._disable_reuse,
            **self._sampling,
        )
        with answer:
            for chunk in answer:
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
            sys.stdout.write("\n")
            done = answer.collect()
        self._turns += 1
        self.history = [*messages, done.message]
        sys.stderr.write(receipt_line(done.receipt) + "\n")

    def end(self) -> None:
        """End the conversation, so that its KV is given up, and begin a new one."""
        ended = self._client.end_conversation(self.conversation_id, model=self._model)
        sys.stderr.write(
            f"ended {self.conversation_id}: "
            f"{'retained KV given up' if ended.released else 'nothing was retained'}\n"
        )
        self._own_id = True
        self.conversation_id = _new_id()
        self._begin()

    def leave(self) -> None:
        """End a conversation whose id was made up here: nobody can come back to it."""
        if not self._own_id or not self._turns:
            return
        try:
            self._client.end_conversation(self.conversation_id, model=self._model)
        except KvloopError:
            return  # the ledger is away; what is retained falls with its TTL

    def _begin(self) -> None:
        self._turns = 0
        self.history = [Message("system", self._system)] if self._system else []


def chat(
    context: typer.Context,
    model: options.ServedModel = "",
    conversation: options.ConversationId = "",
    system: Annotated[str, typer.Option(help="System message.")] = "",
    max_tokens: options.MaxTokens = 512,
    temperature: options.Temperature = None,
    no_reuse: options.NoReuse = False,
    router: options.Router = DEFAULT_ROUTER,
) -> None:
    """Chat with a model; after each answer, see what was pulled and what it gained.

    /end gives the conversation's retained KV up and starts a new one, /quit or
    Ctrl-D leaves, Ctrl-C stops an answer. A conversation that was named with
    --conversation is kept for another time. With input from a pipe, each line is
    one message. Answers go to standard output, receipts to standard error.

    \b
    Examples:
      kvloop chat
      kvloop chat --conversation trip --system 'Answer in one sentence.'
      printf 'Hello!\\nAnd now?\\n' | kvloop chat
    """
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature)
    with Client(router, tls=tls_of(context)) as client:
        session = ChatSession(
            client,
            choose_model(client, model),
            conversation_id=conversation,
            system=system,
            sampling=sampling,
            disable_reuse=no_reuse,
        )
        try:
            _run(session, interactive=sys.stdin.isatty())
        finally:
            session.leave()


def _run(session: ChatSession, *, interactive: bool) -> None:
    if interactive:
        sys.stderr.write(f"conversation {session.conversation_id}   {_HELP}\n")
    for line in _lines(interactive):
        if line == "/quit":
            return
        try:
            _handle(session, line)
        except KeyboardInterrupt:
            if not interactive:
                raise
            sys.stderr.write("\nstopped\n")
        except KvloopError as error:
            if not interactive:  # a script shall notice
                raise
            sys.stderr.write(f"\n{explain(error)}\n")


def _handle(session: ChatSession, line: str) -> None:
    if line == "/end":
        session.end()
    elif line == "/help":
        sys.stderr.write(_HELP + "\n")
    elif line:
        session.say(line)


def _lines(interactive: bool) -> Iterator[str]:
    if not interactive:
        for line in sys.stdin:
            yield line.strip()
        return
    import readline  # noqa: F401  loaded for input(): history and line editing

    while True:
        try:
            yield input("> ").strip()
        except EOFError:
            sys.stderr.write("\n")
            return


def _new_id() -> str:
    return f"chat-{uuid.uuid4().hex[:12]}"
