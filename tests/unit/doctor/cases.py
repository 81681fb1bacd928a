"""A stack in good order, and ways to spoil it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from kvloop.common.v1 import common_pb2
from kvloop.completions import Choice, Completion
from kvloop.doctor.facts import DECODE, PREFILL, Facts, Service, WorkerFacts
from kvloop.doctor.findings import Finding
from kvloop.durations import to_duration
from kvloop.kvmeta.v1 import ledger_pb2, registry_pb2
from kvloop.receipts import Receipt, Usage
from kvloop.worker.v1 import worker_pb2

Check = Callable[[Facts], Iterator[Finding]]


def worker(
    worker_id: str, role: common_pb2.WorkerRole.ValueType, *, address: str = "", **traits: Any
) -> registry_pb2.Worker:
    """A worker as it registers."""
    chosen: dict[str, Any] = {
        "vllm_version": "0.25.1",
        "nixl_version": "1.5.1",
        "contract_version": 1,
        "block_size": 16,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "kv_connector": "KvloopConnector",
        "kv_buffer_device": "cuda",
        "kv_cache_dtype": "auto",
        "side_channel_host": "10.0.0.1",
        "max_model_len": 40_000,
        "num_kv_blocks": 10_000,
        "kv_block_bytes": 4_000_000,
        "bidirectional_kv_xfer": True,
        "decoder_kv_blocks_ttl": to_duration(480),
        "pin_lease": to_duration(60),
        "lease_renewal": True,
        **traits,
    }
    return registry_pb2.Worker(
        worker_id=worker_id,
        role=role,
        address=address or f"10.0.0.1:{7300 if role == PREFILL else 7400}",
        model="qwen",
        engine=common_pb2.EngineRef(engine_id=f"engine-of-{worker_id}", epoch="1"),
        traits=registry_pb2.EngineTraits(**chosen),
        state=registry_pb2.Worker.STATE_ACTIVE,
    )


def link(
    gigabytes_per_second: float,
    *,
    to: str = "decode-0",
    bytes_per_token: float = 250_000,
    latency_seconds: float = 0.002,
    held_back: bool = False,
) -> worker_pb2.LinkEstimate:
    """A measured link."""
    rate = gigabytes_per_second * 1e9
    return worker_pb2.LinkEstimate(
        engine=common_pb2.EngineRef(engine_id=f"engine-of-{to}", epoch="1"),
        samples=5,
        tokens_per_second=rate / bytes_per_token,
        bytes_per_second=rate,
        latency=to_duration(latency_seconds),
        held_back=held_back,
    )


def answering(of: registry_pb2.Worker, **info: Any) -> WorkerFacts:
    """A worker whose sidecar says so."""
    return WorkerFacts(
        of, worker_pb2.GetWorkerInfoResponse(**{"worker": of, "registered": True, **info})
    )


def prefill(*links: worker_pb2.LinkEstimate, name: str = "prefill-0", **traits: Any) -> WorkerFacts:
    """A prefill worker that computes 10,000 tokens per second."""
    of = worker(name, PREFILL, **traits)
    return answering(of, links=links or (link(200.0),), prefill_tokens_per_second=10_000.0)


def decode(
    name: str = "decode-0", *, info: dict[str, Any] | None = None, **traits: Any
) -> WorkerFacts:
    """A decode worker."""
    return answering(worker(name, DECODE, **traits), **(info or {}))


def stack(*workers: WorkerFacts, **changes: Any) -> Facts:
    """A stack; without workers one of each role in good order."""
    facts = Facts(
        router=Service("router:7100"),
        kvmeta=Service("kvmeta:7200"),
        models=("qwen",),
        workers=workers or (prefill(), decode()),
        clock_offset_seconds=0.1,
    )
    return replace(facts, **changes)


def conversation(turn: int) -> ledger_pb2.Conversation:
    """A conversation that got so far."""
    return ledger_pb2.Conversation(turn=turn)


def receipt(**changes: Any) -> Receipt:
    """A receipt of a turn that pulled."""
    found = Receipt(
        turn_id="t",
        turn=2,
        prefill_worker_id="prefill-0",
        decode_worker_id="decode-0",
        handle_hit=True,
        miss_reason=None,
        prompt_tokens=4500,
        proven_tokens=4400,
        pulled_tokens=4400,
        cached_tokens=0,
        recomputed_tokens=100,
        ttft_seconds=0.05,
        prefill_leg_seconds=0.04,
        decode_leg_seconds=0.01,
        retain_outcome="RETAINED",
        retained_tokens=4500,
        retained_ttl_seconds=470.0,
        pull_seconds=0.02,
    )
    return replace(found, **changes)


def found(check: Check, facts: Facts) -> dict[str, Finding]:
    """Findings of one check, by name."""
    return {finding.check: finding for finding in check(facts)}


def completion(*, token_ids: tuple[int, ...]) -> Completion:
    """An answer of these tokens."""
    choice = Choice("", "", (), "length", token_ids)
    return Completion((choice,), Usage(1, len(token_ids)), receipt(), "", None)
