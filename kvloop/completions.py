"""A whole answer, put together from its chunks."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvloop.chunks import ChoiceDelta, Chunk, ToolCallDelta, parse_chunk
from kvloop.errors import InternalError
from kvloop.messages import Message, ToolCall
from kvloop.receipts import Receipt, Usage, parse_receipt, parse_usage
from kvloop.router.v1 import router_pb2


@dataclass(frozen=True, slots=True)
class Choice:
    """One of an answer's choices.

    Attributes:
        text: the answer's text.
        reasoning: reasoning text, for engines that separate it; "" otherwise.
        tool_calls: calls the model made.
        finish_reason: "stop", "length", "tool_calls", ...
        token_ids: the generated tokens, if `return_token_ids` was asked for.
    """

    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str | None
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer.

    Attributes:
        choices: one choice, or as many as `n` asked for.
        usage: token counts.
        receipt: what kvloop did for this turn.
        client_request_id: the caller's own id, echoed.
        prompt_token_ids: the prompt's tokens, if `return_token_ids` was asked for.
    """

    choices: tuple[Choice, ...]
    usage: Usage
    receipt: Receipt
    client_request_id: str
    prompt_token_ids: tuple[int, ...] | None

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Calls of the first choice."""
        return self.choices[0].tool_calls

    @property
    def finish_reason(self) -> str | None:
        """Why the first choice ended."""
        return self.choices[0].finish_reason

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Generated tokens of the first choice, if they were asked for."""
        return self.choices[0].token_ids

    @property
    def message(self) -> Message:
        """The first choice as a history entry for the next turn.

        Reasoning is left out, as chat templates expect of history.
        """
        first = self.choices[0]
        return Message(
            role="assistant",
            content=None if first.tool_calls and not first.text else first.text,
            tool_calls=first.tool_calls,
        )


@dataclass(slots=True)
class _Call:
    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Parts:
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, _Call] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, choice: ChoiceDelta) -> None:
        self.finish_reason = choice.finish_reason or self.finish_reason
        self.token_ids += choice.token_ids or ()
        self.text.append(choice.text or "")
        delta = choice.delta
        if delta is None:
            return
        self.text.append(delta.content or "")
        self.reasoning.append(delta.reasoning_content or delta.reasoning or "")
        for call in delta.tool_calls or ():
            self._add_call(call)

    def _add_call(self, part: ToolCallDelta) -> None:
        call = self.calls.setdefault(part.index, _Call())
        call.id = call.id or part.id or ""
        if part.function is not None:
            call.name = call.name or part.function.name or ""
            call.arguments.append(part.function.arguments or "")

    def choice(self) -> Choice:
        return Choice(
            text="".join(self.text),
            reasoning="".join(self.reasoning),
            tool_calls=tuple(
                ToolCall(call.id, call.name, "".join(call.arguments))
                for _, call in sorted(self.calls.items())
            ),
            finish_reason=self.finish_reason,
            token_ids=tuple(self.token_ids),
        )


class Assembler:
    """Puts an answer together, event by event."""

    def __init__(self) -> None:
        self._parts: dict[int, _Parts] = {0: _Parts()}
        self._prompt_token_ids: tuple[int, ...] | None = None
        self.completion: Completion | None = None
        """The whole answer, once its last event was added."""

    def add(self, response: router_pb2.ChatResponse | router_pb2.GenerateResponse) -> list[Chunk]:
        """Take one event of the stream.

        Returns:
            Its chunks; the last event may have none.

        Raises:
            InternalError: a chunk cannot be read.
        """
        match response.WhichOneof("event"):
            case "result":
                self.completion = self._finish(response.result)
                return []
            case "batch":
                chunks = [self._add(chunk) for chunk in response.batch.chunks_json]
                if response.batch.HasField("result"):
                    self.completion = self._finish(response.batch.result)
                return chunks
            case _:
                return [self._add(response.chunk.json)]

    def _add(self, json: bytes) -> Chunk:
        chunk = parse_chunk(json)
        if chunk.prompt_token_ids is not None:
            self._prompt_token_ids = chunk.prompt_token_ids
        for choice in chunk.choices:
            self._parts.setdefault(choice.index, _Parts()).add(choice)
        return chunk

    def finished(self) -> Completion:
        """The whole answer, after the stream has ended.

        Raises:
            InternalError: the stream ended without its last event.
        """
        if self.completion is None:
            raise InternalError("the router ended the answer without a result")
        return self.completion

    def _finish(self, result: router_pb2.TurnResult) -> Completion:
        return Completion(
            choices=tuple(parts.choice() for _, parts in sorted(self._parts.items())),
            usage=parse_usage(result.usage),
            receipt=parse_receipt(result.receipt),
            client_request_id=result.client_request_id,
            prompt_token_ids=self._prompt_token_ids,
        )
