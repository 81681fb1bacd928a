"""Requests of the cases, in the form of either front."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import msgspec

from bench.relay.replies import MODEL
from kvloop.common.v1 import common_pb2
from kvloop.router.v1 import router_pb2
from kvloop.worker.v1 import worker_pb2

_SMALL_WORDS = 150
_WORDS = ("time", "first", "token", "block", "cache", "turn", "worker", "handle")


@dataclass(frozen=True)
class Prompt:
    """One request.

    Attributes:
        messages: chat messages; empty for a completion.
        token_ids: of a completion.
        tokens: tokens to generate.
        gap_us: microseconds between two of them; 0: as fast as they are read.
        burst: tokens that the engine writes at once.
        conversation: conversation id; empty for none.
        encoded: messages or token ids as JSON.
    """

    messages: tuple[tuple[str, str], ...]
    token_ids: tuple[int, ...]
    tokens: int
    gap_us: int
    encoded: msgspec.Raw
    burst: int = 64
    conversation: str = ""

    @property
    def path(self) -> str:
        """Of the HTTP front."""
        return "/v1/chat/completions" if self.messages else "/v1/completions"

    def of(self, conversation: str) -> Prompt:
        """The same in another conversation."""
        return replace(self, conversation=conversation)

    def body(self) -> bytes:
        """For the HTTP front, and for engines."""
        return msgspec.json.encode(
            {
                "model": MODEL,
                "messages" if self.messages else "prompt": self.encoded,
                "stream": True,
                "max_tokens": self.tokens,
                "gap_us": self.gap_us,
                "burst": self.burst,
                **({"conversation_id": self.conversation} if self.conversation else {}),
            }
        )

    def leg(self) -> bytes:
        """For a sidecar."""
        leg = worker_pb2.DecodeRequest(
            turn_id=self.conversation, api=common_pb2.API_CHAT_COMPLETIONS, body_json=self.body()
        )
        return leg.SerializeToString()

    def message(self) -> tuple[str, bytes]:
        """Method of the gRPC front, and the message for it."""
        sampling = router_pb2.SamplingParams(max_tokens=self.tokens)
        extra = b'{"gap_us":%d,"burst":%d}' % (self.gap_us, self.burst)
        if self.messages:
            chat = router_pb2.ChatRequest(
                model=MODEL,
                messages=[router_pb2.ChatMessage(role=r, content=c) for r, c in self.messages],
                conversation_id=self.conversation,
                sampling=sampling,
                extra_body_json=extra,
                accept_batches=True,
            )
            return "Chat", chat.SerializeToString()
        generate = router_pb2.GenerateRequest(
            model=MODEL,
            token_ids_json=bytes(self.encoded),
            conversation_id=self.conversation,
            sampling=sampling,
            extra_body_json=extra,
            accept_batches=True,
        )
        return "Generate", generate.SerializeToString()


def small(tokens: int, gap_us: int = 0, burst: int = 64) -> Prompt:
    """A short chat."""
    return replace(_chat([_text(_SMALL_WORDS * 6)], tokens, gap_us), burst=burst)


def long_messages(tokens: int) -> Prompt:
    """400 KB of chat messages, 40 of them."""
    return _chat([_text(10_000) for _ in range(40)], tokens, 0)


def long_ids(tokens: int) -> Prompt:
    """33,000 token ids."""
    source = random.Random(1)
    ids = tuple(source.randrange(10, 150_000) for _ in range(33_000))
    return Prompt((), ids, tokens, 0, msgspec.Raw(msgspec.json.encode(ids)))


def _chat(texts: list[str], tokens: int, gap_us: int) -> Prompt:
    messages = tuple(("assistant" if i % 2 else "user", text) for i, text in enumerate(texts))
    encoded = msgspec.json.encode([{"role": r, "content": c} for r, c in messages])
    return Prompt(messages, (), tokens, gap_us, msgspec.Raw(encoded))


def _text(characters: int) -> str:
    source = random.Random(characters)
    words = [source.choice(_WORDS) for _ in range(characters // 5)]
    return " ".join(words)[:characters]
