"""The workers that a leg can go to, as policies see them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property

from kvloop.common.v1 import common_pb2
from kvloop.kvmeta.v1 import registry_pb2
from services.router.breaker import BreakerState
from services.router.worker_load import DecodeLoad, PrefillLoad, WorkerLoad


@dataclass(slots=True, eq=False)
class Candidate:
    """One live worker and what this router knows of it now.

    The pool keeps it up to date; everyone else only reads it.
    """

    worker: registry_pb2.Worker
    """As registered."""
    in_flight: int = 0
    """Turns that this router has in flight there."""
    reachable: bool = True
    """False while its breaker is open, or a probe is under way."""
    breaker: BreakerState = BreakerState.CLOSED
    """State of its breaker."""
    load: WorkerLoad = None  # type: ignore[assignment]
    """Its queue and figures."""
    worker_id: str = field(init=False)
    """Name of the worker."""
    takes_turns: bool = field(init=False)
    """False while it only finishes what it has."""
    number: int = field(init=False)
    """Differs for each name; see services/router/rendezvous.py."""
    kind: bytes = field(init=False)
    """Equal for workers that exchange KV with the same others."""

    def __post_init__(self) -> None:
        if self.load is None:
            is_prefill = self.worker.role == common_pb2.WORKER_ROLE_PREFILL
            self.load = PrefillLoad() if is_prefill else DecodeLoad()
        name = hashlib.blake2b(self.worker.worker_id.encode(), digest_size=8)
        self.number = int.from_bytes(name.digest())
        self.registered(self.worker)

    def registered(self, worker: registry_pb2.Worker) -> None:
        """Take over what the worker has registered."""
        self.worker = worker
        self.worker_id = worker.worker_id
        self.takes_turns = worker.state != registry_pb2.Worker.STATE_DRAINING
        self.kind = _kind(worker)


class Roster(tuple[Candidate, ...]):
    """The live workers of one model and role.

    Holds what every choice among them would else work out anew: of hundreds of
    workers, that takes longer than the choice. The pool makes another one when a
    worker comes or goes, takes no more turns, or is cut off or back.
    """

    @cached_property
    def usable(self) -> tuple[Candidate, ...]:
        """Those that take turns and can be reached."""
        return tuple(each for each in self if each.takes_turns and each.reachable)

    @cached_property
    def kinds(self) -> dict[bytes, registry_pb2.Worker]:
        """One usable worker of each kind."""
        return {candidate.kind: candidate.worker for candidate in self.usable}

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """`Candidate.number` of those that are usable."""
        return tuple(candidate.number for candidate in self.usable)

    def but(self, worker_ids: Collection[str]) -> Roster:
        """The same without some of them."""
        return Roster(each for each in self if each.worker_id not in worker_ids)


def _kind(worker: registry_pb2.Worker) -> bytes:
    """What `kvloop.compatibility` looks at: everything but the engine's own life."""
    traits = registry_pb2.EngineTraits()
    traits.CopyFrom(worker.traits)
    traits.side_channel_host, traits.side_channel_port, traits.num_kv_blocks = "", 0, 0
    return worker.model.encode() + b"\0" + traits.SerializeToString(deterministic=True)
