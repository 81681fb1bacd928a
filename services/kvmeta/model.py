"""What the ledger and the registry remember, as plain values.

Times are integer microseconds of the ledger's clock (see clock.py), durations
integer microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MICROSECONDS = 1_000_000


class HandleState(StrEnum):
    """State of a conversation's newest handle."""

    AVAILABLE = "AVAILABLE"
    TAKEN = "TAKEN"
    SPENT = "SPENT"
    RELEASED = "RELEASED"
    EXPIRED = "EXPIRED"
    VOID = "VOID"


LIVE_STATES = (HandleState.AVAILABLE, HandleState.TAKEN)


class MissReason(StrEnum):
    """Why a take got no handle; the ledger's share of common.v1.MissReason."""

    FIRST_TURN = "FIRST_TURN"
    TAKEN = "TAKEN"
    SPENT = "SPENT"
    RELEASED = "RELEASED"
    EXPIRED = "EXPIRED"
    VOID = "VOID"
    EVICTED = "EVICTED"


class ReleaseCause(StrEnum):
    """Why retained blocks are no longer wanted."""

    ENDED = "ENDED"
    SUPERSEDED = "SUPERSEDED"
    EXPIRED = "EXPIRED"
    BUDGET = "BUDGET"
    LEASE_ENDED = "LEASE_ENDED"


@dataclass(frozen=True, slots=True)
class ConversationKey:
    """Names one conversation. Every key starts with its tenant."""

    tenant: str
    model: str
    conversation_id: str


@dataclass(frozen=True, slots=True)
class EngineRef:
    """One life of one engine."""

    engine_id: str
    epoch: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation and its newest handle, without the handle's params.

    A conversation that was ended before its first turn was committed has no
    handle yet: `turn` is 0. Such a row exists to make that late commit lose.
    """

    key: ConversationKey
    issued_turn: int
    """Highest turn number given out."""
    ended_turn: int
    """Highest turn number given out when the conversation was last ended; 0 if
    it never was. Commits of these turns lose."""
    conversation_ttl_us: int | None
    """Set by ExtendConversation; None if the engine's TTL applies."""
    state: HandleState
    release_cause: ReleaseCause | None
    """Why the handle is RELEASED; None in every other state."""
    turn: int
    """Turn that left the handle behind; 0 if there is no handle."""
    handle_id: str
    worker_id: str
    engine: EngineRef
    num_tokens: int
    num_blocks: int
    take_request_id: str
    """Request that holds the handle; empty unless it was taken."""
    take_turn: int
    """Turn that the take opened; 0 unless the handle was taken."""
    commit_request_id: str
    """Request that committed the handle."""
    commit_revision: int
    """Revision of that commit."""
    commit_time_us: int
    expire_time_us: int
    """When the handle stops being given out."""
    engine_ttl_us: int
    """How long after the commit the engine drops the blocks unless they are renewed."""
    retention_ttl_us: int
    """How long after the commit the worker can keep the blocks by renewing their
    pin; 0 if it cannot be renewed."""
    drop_time_us: int
    """When the engine drops the blocks, by all that it has confirmed."""
    deadline_extension_us: int
    """By how much renewals have moved the engine's deadline since the commit."""
    due_time_us: int
    """When the sweeper has to look at this row next."""
    revision: int
    """Grows with every change of this row; see rules.next_revision."""


@dataclass(frozen=True, slots=True)
class Handle:
    """The right to pull one conversation's retained KV, once."""

    handle_id: str
    worker_id: str
    engine: EngineRef
    turn: int
    params: bytes
    num_tokens: int
    num_blocks: int
    deadline_extension_us: int
    """By how much the engine's deadline was moved since the params were written."""


@dataclass(frozen=True, slots=True)
class Release:
    """Blocks of one engine that are no longer wanted."""

    revision: int
    """Strictly increasing over all releases, in the order of their commit."""
    handle: Handle
    cause: ReleaseCause


@dataclass(frozen=True, slots=True)
class Commit:
    """A finished turn that wants to store its handle.

    `turn` is 0 if the ledger could not be asked when the turn began.
    """

    key: ConversationKey
    request_id: str
    turn: int
    worker_id: str
    engine: EngineRef
    params: bytes
    engine_ttl_us: int
    num_tokens: int
    num_blocks: int
    retention_ttl_us: int = 0
    """How long renewals can keep the blocks; 0 if they cannot be renewed."""


class PinVerdict(StrEnum):
    """What shall become of a pin; the same words as PinStatus.Verdict."""

    WANTED = "WANTED"
    IN_USE = "IN_USE"
    RELEASE = "RELEASE"
    UNOWNED = "UNOWNED"


@dataclass(frozen=True, slots=True)
class HeldPin:
    """The retained KV of one finished turn, as its engine holds it."""

    turn_id: str
    """The request that committed the turn."""
    engine_remaining_us: int
    """Time until the engine drops the blocks by itself."""
    deadline_extension_us: int
    """By how much renewals have moved the engine's deadline, in total."""


@dataclass(frozen=True, slots=True)
class PinStatus:
    """The ledger's answer for one pin. An UNOWNED one has no conversation."""

    turn_id: str
    verdict: PinVerdict
    key: ConversationKey | None = None
    wanted_for_us: int = 0
    """How much longer the conversation wants a WANTED pin."""
    age_us: int = 0
    """Time since the commit."""
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RetainedPin:
    """Retained KV with the conversation that owns it."""

    conversation: Conversation
    kv_block_bytes: int
    """Memory of one of its blocks; 0 if the worker did not say."""


class WorkerRole(StrEnum):
    """Leg of a turn that a worker runs."""

    PREFILL = "PREFILL"
    DECODE = "DECODE"


class WorkerState(StrEnum):
    """Whether a worker takes new turns."""

    ACTIVE = "ACTIVE"
    DRAINING = "DRAINING"


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """What must be known of an engine to pair it with another.

    Stored as JSON: a new field needs a default, for rows written before it.
    """

    vllm_version: str
    contract_version: int
    block_size: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    kv_connector: str
    kv_buffer_device: str
    side_channel_host: str
    side_channel_port: int
    max_model_len: int
    num_kv_blocks: int
    bidirectional_kv_xfer: bool
    decoder_kv_blocks_ttl_us: int
    kv_recompute_threshold: int
    hybrid_kv_cache: bool
    lease_renewal: bool
    kv_cache_dtype: str
    nixl_version: str
    pin_lease_us: int = 0
    """How long blocks are kept without a renewal; 0 if pins are not renewed."""
    kv_block_bytes: int = 0
    """Memory of one block over all layers and ranks; 0 if unknown."""
    prepared_legs: int = 0
    """Legs whose bodies the sidecar keeps at a time before they begin."""


@dataclass(frozen=True, slots=True)
class Worker:
    """One vLLM server with its sidecar."""

    worker_id: str
    role: WorkerRole
    address: str
    model: str
    engine: EngineRef
    traits: EngineTraits
    state: WorkerState


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A worker and its lease. A removed worker stays for a while, as a change
    that watchers have yet to see."""

    worker: Worker
    lease_id: str
    lease_ttl_us: int
    lease_expire_us: int
    """When the lease ends, or when it ended if `removed`."""
    removed: bool
    added_revision: int
    """Registry revision at which it was new, or came back after its removal."""
    revision: int
    """Registry revision of the last change, lease renewals not counted."""


@dataclass(frozen=True, slots=True)
class Retained:
    """What a worker's engine holds for conversations."""

    conversations: int = 0
    blocks: int = 0
