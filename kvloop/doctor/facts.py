"""What is known of a running stack. Findings are made from this alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvloop.bench.transfers import Transfers
from kvloop.common.v1 import common_pb2
from kvloop.kvmeta.v1 import ledger_pb2, registry_pb2
from kvloop.receipts import Receipt
from kvloop.worker.v1 import worker_pb2

PREFILL = common_pb2.WORKER_ROLE_PREFILL
DECODE = common_pb2.WORKER_ROLE_DECODE


@dataclass(frozen=True)
class Service:
    """A service that was called.

    Attributes:
        address: host:port.
        trouble: why it did not answer; empty if it did.
    """

    address: str
    trouble: str = ""


@dataclass(frozen=True)
class WorkerFacts:
    """One worker.

    Attributes:
        worker: as it registered, or as it says of itself if it has not.
        info: what its sidecar says now; None if it did not answer.
        trouble: why it did not answer; empty if it did.
        listed: the registry lists it.
        retained_blocks: KV blocks that the ledger knows to be retained there.
    """

    worker: registry_pb2.Worker
    info: worker_pb2.GetWorkerInfoResponse | None = None
    trouble: str = ""
    listed: bool = True
    retained_blocks: int = 0

    @property
    def name(self) -> str:
        """Worker id, or the address where nothing answered."""
        return self.worker.worker_id or self.worker.address


@dataclass(frozen=True)
class ProbeRound:
    """One synthetic conversation.

    Attributes:
        first: receipt of the turn that decode computed alone and retained.
        second: receipt of the turn that should have pulled it.
    """

    first: Receipt
    second: Receipt


@dataclass(frozen=True)
class Probe:
    """What a few synthetic conversations showed.

    Attributes:
        rounds: the conversations, in order.
        recompute: receipt of a turn of the same length without reuse.
        pulls: what prefill's engine counted meanwhile; None if it was not asked.
    """

    rounds: tuple[ProbeRound, ...]
    recompute: Receipt
    pulls: Transfers | None = None


@dataclass(frozen=True)
class Facts:
    """All that was found out.

    Attributes:
        router: the router that was asked.
        kvmeta: the kvmeta that was asked.
        models: names of the models that the router serves now.
        workers: every worker, prefill first, then by id.
        conversations: of one tenant, most recent first.
        clock_offset_seconds: the ledger's clock minus this machine's; None if
            nothing told it.
        probe: what a probe showed; None if there was none.
    """

    router: Service
    kvmeta: Service
    models: tuple[str, ...] = ()
    workers: tuple[WorkerFacts, ...] = ()
    conversations: tuple[ledger_pb2.Conversation, ...] = ()
    clock_offset_seconds: float | None = None
    probe: Probe | None = None

    def of_role(self, role: common_pb2.WorkerRole.ValueType) -> list[WorkerFacts]:
        """Listed workers that run one leg."""
        return [each for each in self.workers if each.listed and each.worker.role == role]

    def pairs(self) -> Iterator[tuple[WorkerFacts, WorkerFacts]]:
        """Every listed prefill worker with every decode worker of its model."""
        for prefill in self.of_role(PREFILL):
            for decode in self.of_role(DECODE):
                if prefill.worker.model == decode.worker.model:
                    yield prefill, decode


@dataclass(frozen=True)
class PairLink:
    """The link of one pair, as far as it was measured.

    Attributes:
        prefill: who pulls.
        decode: who is pulled from.
        link: the measurement; None if there is none yet.
    """

    prefill: WorkerFacts
    decode: WorkerFacts
    link: worker_pb2.LinkEstimate | None

    @property
    def name(self) -> str:
        """Both workers."""
        return f"{self.prefill.name} <- {self.decode.name}"

    @property
    def gigabytes_per_second(self) -> float:
        """Rate of a long pull; 0 if unknown."""
        return self.link.bytes_per_second / 1e9 if self.link is not None else 0.0

    @property
    def prefill_tokens_per_second(self) -> float:
        """What the prefill engine computes instead; 0 if unknown."""
        info = self.prefill.info
        return info.prefill_tokens_per_second if info is not None else 0.0


def pair_links(facts: Facts) -> list[PairLink]:
    """The link of every pair of workers that answered."""
    found = []
    for prefill, decode in facts.pairs():
        if prefill.info is None:
            continue
        link = next((x for x in prefill.info.links if x.engine == decode.worker.engine), None)
        found.append(PairLink(prefill, decode, link))
    return found
