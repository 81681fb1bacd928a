"""One request inside the engine: a sequence of tokens and where its KV is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from services.sim.faults import Fault
from services.sim.kv import KvReader

Grammar = Callable[[bytes], Tokens[int]]
"""Makes the whole answer out of the digest of the prompt's KV: a forced tool call."""


class Phase(StrEnum):
    """Where a sequence is."""

    WAITING = "waiting"
    LOADING = "loading"
    """Waits for blocks from another engine."""
    RUNNING = "running"
    ENDED = "ended"


class Ending(StrEnum):
    """How a sequence ended; the value is OpenAI's finish_reason."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Output(NamedTuple):
    """One token, or the end without one."""

    choice: int
    token: int | None
    digest: bytes
    """Of all KV before the token: what its log probability is made from."""
    ending: Ending | None = None
    stop_token: int | None = None
    """The stop token id that ended the sequence."""
    params: dict[str, Any] | None = None
    """Transfer params of the finished request."""


class OutputChannel:
    """Carries outputs from the engine to the request's HTTP reply."""

    def __init__(self) -> None:
        self._outputs: list[Output] = []
        self._arrived = asyncio.Event()

    def put(self, output: Output) -> None:
        """Add an output. Never blocks: like vLLM, the engine does not wait for
        slow readers; an answer's length bounds the memory."""
        self._outputs.append(output)
        self._arrived.set()

    async def take(self) -> list[Output]:
        """All outputs since the last call; waits for the first."""
        while not self._outputs:
            self._arrived.clear()
            await self._arrived.wait()
        outputs, self._outputs = self._outputs, []
        return outputs


@dataclass(frozen=True)
class Sampling:
    """What a request asks of the model."""

    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    variation: bytes = b""
    """Tells choices and seeds apart; empty for the greedy answer."""


@dataclass
class PrefillReport:
    """What a prefill engine does with a prompt; see services/worker/connector.py."""

    has_handle: bool = False
    proven: int = 0
    cached: int = 0
    pulled: int = 0
    miss_reason: str | None = None
    held_back: bool = False
    """Less than what is proven is offered for the pull."""
    pull_started: float | None = None
    pull_seconds: float | None = None
    expected_pull_seconds: float | None = None
    expected_recompute_seconds: float | None = None


@dataclass(eq=False)
class Sequence:
    """One request, or one choice of it."""

    request_id: str
    choice: int
    tokens: list[int]
    """Prompt, then answer."""
    prompt_tokens: int
    sampling: Sampling
    salt: str | None
    params: dict[str, Any] | None
    """kv_transfer_params; the connector changes them, as NIXL's does."""
    channel: OutputChannel
    kv: KvReader
    arrived_at: float = 0.0
    faults: Tokens[Fault] = ()

    phase: Phase = Phase.WAITING
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    """Leading tokens whose KV is in the blocks."""
    hashes: list[bytes] = field(default_factory=list)
    """Prefix cache hashes of the complete blocks."""
    num_cached_blocks: int = 0
    """Leading blocks that the prefix cache knows already."""
    cached_tokens: int | None = None
    """Tokens that were not computed here, local and remote; None before the first
    scheduling."""
    loaded: bool = False
    """A transfer has ended and `computed` is set: do not look again."""
    tracked: bool = False
    """The connector will know of the end of a pin."""
    report: PrefillReport | None = None
    grammar: Grammar | None = None
    script: list[int] = field(default_factory=list)
    """Tokens that the grammar still forces, last one first."""
    first_token_at: float | None = None
    last_token_at: float = 0.0

    @property
    def answer_tokens(self) -> int:
        """Tokens generated."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def ended(self) -> bool:
        """True once the outcome is settled."""
        return self.phase is Phase.ENDED
