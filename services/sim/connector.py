"""What the KV connector decides: how much to pull, what to keep, what to report.

`StockConnector` follows NixlConnector in pull mode, `KvloopConnector` follows
services/worker/connector.py on top of it. They decide; transfers, pins and
events are carried out by the engine core.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from services.sim.sequence import Ending, PrefillReport, Sequence
from services.sim.spec import EngineSpec, Identity
from services.worker.proof import ExtraKeys, Proof, make_proof, proven_tokens
from services.worker.pull_plan import COSTS, SLOWER_THAN_RECOMPUTE, plan

TURN_ID = "kvloop_turn_id"
RETAIN = "kvloop_retain"
PROOF = "kvloop_proof"
REPORT = "kvloop_report"
DEADLINE_EXTENSION = "kvloop_deadline_extension"

_REMOTE_FIELDS = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


@dataclass(frozen=True)
class Remote:
    """Blocks in another engine, as transfer params name them."""

    engine_id: str
    request_id: str
    host: str
    port: int
    blocks: list[int]
    deadline: float | None
    """On the other engine's clock."""


@dataclass(frozen=True)
class Load:
    """A read of another engine's blocks."""

    request_id: str
    """The reading request."""
    remote: Remote
    local_blocks: list[int]
    """Blocks to fill. None: the other engine is only told to free its own."""
    is_readback: bool
    """Prefill reads what decode kept, so a deadline counts."""


@dataclass(frozen=True)
class Outcome:
    """What the connector wants done with a request that has ended."""

    reply: dict[str, Any] | None = None
    """kv_transfer_params of the reply."""
    keep_until: float | None = None
    """Deadline of the pin, on the engine's clock; None: the blocks are freed."""
    event: dict[str, Any] | None = None
    """What the sidecar is told."""
    notify: Load | None = None
    """A remote engine that waits in vain for a read."""


class Connector(Protocol):
    """The scheduler half of a KV connector."""

    def matched_tokens(self, sequence: Sequence, computed: int) -> int:
        """Tokens to pull beyond those computed or cached here."""

    def allocated(self, sequence: Sequence, cached_blocks: int, external: int) -> Load | None:
        """The read to start, now that the sequence has its blocks.

        Args:
            sequence: the sequence.
            cached_blocks: leading blocks that hold the right KV already.
            external: tokens to pull.
        """

    def load_failed(self, sequence: Sequence, *, expired: bool) -> None:
        """The read of a sequence has failed."""

    def finished(self, sequence: Sequence, ending: Ending, now: float) -> Outcome:
        """What becomes of an ended sequence's blocks.

        Args:
            sequence: the sequence.
            ending: how it ended.
            now: time on the engine's clock.
        """


class StockConnector:
    """NixlConnector.

    Args:
        spec: the engine.
        identity: its life.
    """

    def __init__(self, spec: EngineSpec, identity: Identity) -> None:
        self._spec = spec
        self._identity = identity

    def matched_tokens(self, sequence: Sequence, computed: int) -> int:
        """All of the prompt from prefill, or what the params say from decode."""
        params = sequence.params
        if not params:
            return 0
        if params.get("do_remote_prefill"):
            return max(sequence.prompt_tokens - computed, 0)
        if not params.get("do_remote_decode") or not params.get("remote_block_ids"):
            return 0
        if not all(name in params for name in _REMOTE_FIELDS):
            return 0
        held = min(params.get("remote_num_tokens") or 0, sequence.prompt_tokens)
        count: int = held - computed
        return count if count > 0 and count >= self._spec.kv_recompute_threshold else 0

    def allocated(self, sequence: Sequence, cached_blocks: int, external: int) -> Load | None:
        """One read per request; with nothing to pull, only the notification."""
        params = sequence.params
        if not params:
            return None
        pulls = bool(params.get("do_remote_prefill"))
        reads_back = bool(params.get("do_remote_decode")) and self._spec.bidirectional
        if params.get("do_remote_decode") or (pulls and self._spec.bidirectional):
            sequence.tracked = True
        if not pulls and not (reads_back and not params.get("_remote_blocks_processed")):
            return None
        load = None
        if params.get("remote_block_ids") and (remote := remote_of(params)):
            end = _blocks_for(sequence.computed, self._spec.block_size)
            local = sequence.blocks[cached_blocks:end] if external else []
            load = Load(sequence.request_id, remote, local, is_readback=reads_back and not pulls)
        params["do_remote_prefill"] = False
        params["_remote_blocks_processed"] = True
        return load

    def load_failed(self, sequence: Sequence, *, expired: bool) -> None:
        """Nothing to note."""

    def finished(self, sequence: Sequence, ending: Ending, now: float) -> Outcome:
        """Keep the blocks of every finished request that carries params."""
        params = sequence.params
        if not params:
            return Outcome()
        is_prefill = bool(params.get("do_remote_decode"))
        if params.get("do_remote_prefill"):
            # Ended before it was scheduled: prefill's blocks wait for a reader.
            remote = remote_of(params)
            params["do_remote_prefill"] = False
            return Outcome(notify=Load(sequence.request_id, remote, [], False) if remote else None)
        if not is_prefill and not self._spec.bidirectional:
            return Outcome()
        if ending not in (Ending.STOP, Ending.LENGTH):
            return Outcome()
        ttl = self._spec.kv_lease_seconds if is_prefill else self._spec.retention_seconds
        deadline = now + ttl
        checked = not is_prefill and self._spec.checks_deadlines
        return Outcome(
            keep_until=deadline,
            reply={
                "do_remote_prefill": is_prefill,
                "do_remote_decode": not is_prefill,
                "remote_block_ids": [list(sequence.blocks)],
                "remote_engine_id": self._identity.engine_id,
                "remote_request_id": sequence.request_id,
                "remote_host": self._spec.side_channel_host,
                "remote_port": self._spec.side_channel_port,
                "tp_size": 1,
                "dcp_size": 1,
                "pp_size": 1,
                "remote_num_tokens": sequence.computed,
                "remote_blocks_expiry_time": deadline if checked else None,
                "transfer_mode": "pull",
            },
        )


class KvloopConnector(StockConnector):
    """NixlConnector that pulls only what it has proven, and reports."""

    def matched_tokens(self, sequence: Sequence, computed: int) -> int:
        """Prove once, cut the params to what is proven, then decide as stock does."""
        params = sequence.params
        if not params or not params.get("do_remote_decode"):
            return super().matched_tokens(sequence, computed)
        if params.get("_remote_blocks_processed"):
            return 0
        report = sequence.report
        if report is None:
            report = sequence.report = self._prove(sequence, params, computed)
        report.cached = computed
        count = super().matched_tokens(sequence, computed)
        if report.has_handle and not count and report.proven:
            if report.proven <= computed:
                report.miss_reason = "CACHED"
            else:
                report.miss_reason = (
                    SLOWER_THAN_RECOMPUTE if report.held_back else "BELOW_THRESHOLD"
                )
        return count

    def allocated(self, sequence: Sequence, cached_blocks: int, external: int) -> Load | None:
        """Note what is about to be pulled, and every pin's end."""
        load = super().allocated(sequence, cached_blocks, external)
        if sequence.params and not sequence.params.get("do_remote_decode"):
            sequence.tracked = True
        if sequence.report is not None and external > 0:
            sequence.report.pulled = external
            sequence.report.miss_reason = None
        return load

    def load_failed(self, sequence: Sequence, *, expired: bool) -> None:
        """Note why nothing was pulled."""
        if sequence.report is not None:
            sequence.report.pulled = 0
            sequence.report.miss_reason = "ENGINE_EXPIRED" if expired else "PULL_FAILED"

    def finished(self, sequence: Sequence, ending: Ending, now: float) -> Outcome:
        """Add the report on prefill; add the proof and tell the sidecar on decode."""
        params = sequence.params
        if not params:
            return Outcome()
        if params.get("do_remote_decode"):
            outcome = super().finished(sequence, ending, now)
            if outcome.reply is not None:
                outcome.reply[REPORT] = _report(sequence)
            return outcome
        turn_id = params.get(TURN_ID)
        if self._broken_off(sequence, ending) and turn_id is not None:
            # A stop string looks as if the client had gone. The sidecar, which knows
            # how the answer ended, releases what nobody will use.
            ending = Ending.STOP
        if params.get(RETAIN) is False and not params.get("do_remote_prefill"):
            outcome = Outcome()
        else:
            outcome = super().finished(sequence, ending, now)
        if outcome.reply is not None:
            tokens = sequence.tokens[: sequence.computed]
            proof = make_proof(tokens, self._spec.block_size, _extra_keys(sequence.salt))
            outcome.reply[PROOF] = proof.to_params()
        if turn_id is None:
            return outcome
        return Outcome(
            outcome.reply, outcome.keep_until, self._event(turn_id, outcome), outcome.notify
        )

    def _broken_off(self, sequence: Sequence, ending: Ending) -> bool:
        answering = sequence.answer_tokens and sequence.computed >= sequence.prompt_tokens
        return self._spec.has_sidecar and ending is Ending.ABORT and bool(answering)

    def _prove(self, sequence: Sequence, params: dict[str, Any], computed: int) -> PrefillReport:
        if not params.get("remote_block_ids"):
            return PrefillReport()
        extension = params.pop(DEADLINE_EXTENSION, None)
        if extension and params.get("remote_blocks_expiry_time") is not None:
            params["remote_blocks_expiry_time"] += extension
        proof = Proof.from_params(params.get(PROOF))
        if proof is None:
            params["remote_num_tokens"] = 0
            return PrefillReport(has_handle=True, miss_reason="UNPROVABLE")
        prompt = sequence.tokens[: sequence.prompt_tokens]
        proven = proven_tokens(proof, prompt, _extra_keys(sequence.salt))
        whole = proven == proof.num_tokens == params.get("remote_num_tokens")
        if not whole and proof.block_size != self._spec.block_size:
            proven = 0
        chosen = plan(
            params.get(COSTS),
            proven=proven,
            cached=computed,
            prompt=sequence.prompt_tokens,
            block_size=proof.block_size,
        )
        offered = chosen.tokens
        if offered < proven and proof.block_size != self._spec.block_size:
            offered = 0
        params["remote_num_tokens"] = offered
        if offered and not (whole and offered == proven):
            keep = _blocks_for(offered, proof.block_size)
            params["remote_block_ids"] = [
                list(group[:keep]) for group in params["remote_block_ids"]
            ]
        return PrefillReport(
            has_handle=True,
            proven=proven,
            miss_reason=None if proven else "PREFIX_MISMATCH",
            held_back=offered < proven,
            expected_pull_seconds=chosen.expected_pull_seconds,
            expected_recompute_seconds=chosen.expected_recompute_seconds,
        )

    def _event(self, turn_id: str, outcome: Outcome) -> dict[str, Any]:
        params = outcome.reply
        blocks = sum(len(group) for group in params["remote_block_ids"]) if params else 0
        return {
            "type": "finished",
            "turn_id": turn_id,
            "retained": params is not None,
            "num_tokens": params["remote_num_tokens"] if params else 0,
            "num_blocks": blocks,
            "ttl_seconds": self._spec.retention_seconds,
            "params": params,
        }


def make_connector(spec: EngineSpec, identity: Identity) -> Connector:
    """The connector that an engine is set up with."""
    return (StockConnector if spec.stock else KvloopConnector)(spec, identity)


def _report(sequence: Sequence) -> dict[str, Any]:
    report = sequence.report or PrefillReport()
    total = sequence.prompt_tokens
    pulled = min(report.pulled, max(total - 1 - report.cached, 0))
    return {
        "prompt_tokens": total,
        "proven_tokens": report.proven,
        "pulled_tokens": pulled,
        "cached_tokens": report.cached,
        "recomputed_tokens": total - report.cached - pulled,
        "miss_reason": report.miss_reason,
        "pull_seconds": report.pull_seconds if report.pulled else None,
        "expected_pull_seconds": report.expected_pull_seconds,
        "expected_recompute_seconds": report.expected_recompute_seconds,
    }


def remote_of(params: dict[str, Any]) -> Remote | None:
    """The blocks that params name; None if something is missing or malformed."""
    engine_id, request_id, host, port = (params.get(name) for name in _REMOTE_FIELDS)
    if not (isinstance(engine_id, str) and isinstance(request_id, str) and isinstance(host, str)):
        return None
    if type(port) is not int:
        return None
    groups = params.get("remote_block_ids")
    blocks = groups[0] if isinstance(groups, list) and groups else []
    if not isinstance(blocks, list) or not all(type(block) is int for block in blocks):
        return None
    deadline = params.get("remote_blocks_expiry_time")
    return Remote(
        engine_id,
        request_id,
        host,
        port,
        blocks,
        float(deadline) if isinstance(deadline, int | float) else None,
    )


def _blocks_for(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def _extra_keys(salt: str | None) -> ExtraKeys | None:
    """What besides tokens makes KV private: the cache salt, as vLLM hashes it."""
    if not salt:
        return None
    return ExtraKeys(lambda start, end: (("cache_salt", salt),) if start == 0 else None, [(0, 1)])
