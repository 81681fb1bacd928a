"""Lines on the event socket between the engine's connector and the sidecar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec


class EngineRef(NamedTuple):
    """One life of one engine."""

    engine_id: str
    epoch: str


class Hello(msgspec.Struct, frozen=True, tag="hello", tag_field="type"):
    """First line of each connection: which engine this is and what it can do."""

    engine_id: str
    epoch: str
    contract_version: int
    kv_role: str
    vllm_version: str
    nixl_version: str
    block_size: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    data_parallel_rank: int
    kv_connector: str
    kv_buffer_device: str
    side_channel_host: str
    side_channel_port: int
    max_model_len: int
    num_kv_blocks: int
    bidirectional_kv_xfer: bool
    decoder_kv_blocks_ttl: float
    """Seconds."""
    kv_recompute_threshold: int
    """Tokens."""
    hybrid_kv_cache: bool
    lease_renewal: bool
    """True if retained blocks fall after `pin_lease_seconds` unless they are renewed."""
    kv_cache_dtype: str
    pin_lease_seconds: float = 0.0
    """0 unless `lease_renewal`."""
    kv_block_bytes: int = 0
    """Memory of one block over all layers and ranks; 0 if unknown."""

    @property
    def ref(self) -> EngineRef:
        """This life of the engine."""
        return EngineRef(self.engine_id, self.epoch)

    @property
    def renewable_seconds(self) -> float:
        """How long renewals can keep a finished turn's blocks; 0: there are none."""
        return self.decoder_kv_blocks_ttl if self.lease_renewal else 0.0


class Finished(msgspec.Struct, frozen=True, tag="finished", tag_field="type"):
    """A decode request that carried a turn id has ended."""

    turn_id: str
    retained: bool
    num_tokens: int = 0
    num_blocks: int = 0
    ttl_seconds: float = 0.0
    """How long the engine keeps the blocks, from when it sent this."""
    params: msgspec.Raw = msgspec.Raw(b"null")
    """The handle, byte for byte; null if nothing is retained."""


class RetainedPin(msgspec.Struct, frozen=True):
    """One pin that an engine holds."""

    request_id: str
    turn_id: str
    num_tokens: int
    num_blocks: int
    remaining_seconds: float
    """Until the engine drops the blocks by itself."""
    extension_seconds: float
    """By how much the deadline was moved since the turn ended."""
    age_seconds: float
    """Since the turn ended."""


class Pins(msgspec.Struct, frozen=True, tag="pins", tag_field="type"):
    """All that the engine retains; follows each hello."""

    pins: list[RetainedPin]


class RenewedPin(msgspec.Struct, frozen=True):
    """A pin whose new deadline is certain."""

    request_id: str
    remaining_seconds: float
    extension_seconds: float
    """By how much the deadline was moved since the turn ended, in total."""


class Renewed(msgspec.Struct, frozen=True, tag="renewed", tag_field="type"):
    """Renewals that the engine confirms. Pins that were freed meanwhile are left out."""

    pins: list[RenewedPin]


class Freed(msgspec.Struct, frozen=True, tag="freed", tag_field="type"):
    """Blocks of these engine requests are free: read, released or expired."""

    request_ids: list[str]


class Pressure(msgspec.Struct, frozen=True, tag="pressure", tag_field="type"):
    """A request could not get its KV blocks while others are retained."""

    blocks_needed: int


Message = Hello | Finished | Pins | Renewed | Freed | Pressure
"""What a connector may send."""


class _Params(msgspec.Struct):
    remote_request_id: str | None = None


_MESSAGE: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)
_PARAMS = msgspec.json.Decoder(_Params | None)


def read_line(line: bytes) -> Message:
    """What the connector sent.

    Raises:
        msgspec.DecodeError: the line is not one of the known messages.
    """
    return _MESSAGE.decode(line)


def release_line(request_ids: Sequence[str]) -> bytes:
    """The line that makes the connector free these engine requests' blocks."""
    return msgspec.json.encode({"type": "release", "request_ids": request_ids}) + b"\n"


def renew_line(leases: Sequence[tuple[str, float]]) -> bytes:
    """The line that moves deadlines: engine request ids, and seconds from now."""
    return msgspec.json.encode({"type": "renew", "pins": leases}) + b"\n"


def request_id_of(params: bytes | msgspec.Raw) -> str | None:
    """The engine request that a handle belongs to; None if it names none."""
    try:
        found = _PARAMS.decode(params)
    except msgspec.DecodeError:
        return None
    return found.remote_request_id if found is not None else None
