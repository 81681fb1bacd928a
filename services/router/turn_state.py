"""The state of one turn, filled in by the steps of the pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvloop.common.v1 import common_pb2
from kvloop.kvmeta.v1 import registry_pb2
from kvloop.worker.v1 import worker_pb2
from services.common.tracing import Span, current
from services.router.deadline import Deadline
from services.router.moves import Move
from services.router.policy import TurnFacts
from services.router.preparation import Preparation
from services.router.request import TurnRequest


@dataclass
class Turn:
    """What is known of a turn so far."""

    turn_id: str
    """Id inside kvloop, the same in every service's log."""
    request: TurnRequest
    """What the caller asked for."""
    deadline: Deadline
    """When the turn must be over."""
    started: float
    """Reading of the router's clock at the start."""

    span: Span = field(default_factory=current)
    """The turn's part of its trace: the current span when the turn begins."""

    key: common_pb2.ConversationKey | None = None
    """Conversation whose handle was asked for; None if none was."""
    commit: worker_pb2.TurnRef | None = None
    """Where the decode worker shall commit the turn; None: nothing is retained."""
    number: int = 0
    """Number in the conversation; 0 if the ledger was not or could not be asked."""
    miss_reason: common_pb2.MissReason.ValueType = common_pb2.MISS_REASON_UNSPECIFIED
    """Why no handle went to a prefill worker, or why it was lost there."""
    handle_hit: bool = False
    """Whether a handle went to a prefill worker."""

    facts: TurnFacts = field(default_factory=TurnFacts)
    """What was known when its workers were chosen. They go on to name a handle that the
    turn has parted with; see `TurnFacts.without_handle`."""
    decode_worker: registry_pb2.Worker | None = None
    """Worker chosen for the decode leg."""
    move: Move | None = None
    """Why that is not the one that last served the conversation; None if it is."""
    prefill_worker: registry_pb2.Worker | None = None
    """Worker that ran the prefill leg; None if it was left out."""
    transfer_params: bytes = b""
    """What the prefill worker handed over; empty if nothing."""
    report: common_pb2.PrefillReport | None = None
    """What the prefill engine did with the prompt."""
    prefill_seconds: float = 0.0
    """Duration of the prefill leg, repeats included."""

    prefill_ahead: Preparation | None = None
    """The prefill leg's body, which goes ahead while the ledger is asked; None: it does not."""
    decode_ahead: Preparation | None = None
    """The decode leg's body, which goes ahead while prefill works; None: it does not."""
    decode_started: float | None = None
    """Reading of the clock when the decode leg began."""
    first_chunk_at: float | None = None
    """Reading of the clock when the first chunk came."""
    summary: worker_pb2.DecodeSummary | None = None
    """The decode worker's last word."""
    last_chunks: Sequence[bytes] = ()
    """Chunks that came with it."""

    def prefill_has_body(self) -> None:
        """The body that went ahead to prefill is not needed any more."""
        ahead, self.prefill_ahead = self.prefill_ahead, None
        if ahead is not None:
            ahead.close()

    def decode_has_body(self) -> None:
        """The body that went ahead to decode is not needed any more."""
        ahead, self.decode_ahead = self.decode_ahead, None
        if ahead is not None:
            ahead.close()

    def close(self) -> None:
        """Give up what went ahead of legs that never began."""
        self.prefill_has_body()
        self.decode_has_body()
