"""NixlConnector with proof: the part of kvloop that runs inside vLLM.

Load it into stock vLLM with

    --kv-transfer-config '{"kv_connector": "KvloopConnector",
      "kv_connector_module_path": "services.worker.connector", ...}'

On a decode engine it adds token digests to the handle of each finished turn and
tells the sidecar about it over a local socket, which works for streams too. On
a prefill engine it proves how much of a prompt the decode engine really holds,
cuts the pull to exactly that, and reports what was proven, pulled, found in the
local prefix cache and left to compute.

Nothing is imported but the standard library, vLLM, and sibling modules that do
the same. Names of vLLM that this module relies
on exist in 0.21 and in 0.33; tests/versions drives this module against the sources
of several versions.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlConnector
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from services.worker import cpu_engine, engine_traits
from services.worker.engine_events import EngineEvents
from services.worker.proof import Proof, make_proof, proven_tokens

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.kvloop.connector")

TURN_ID = "kvloop_turn_id"
"""Set by the sidecars on both legs; the event of a finished turn repeats it."""
PROOF = "kvloop_proof"
"""Set here on decode engines: see services/worker/proof.py."""
REPORT = "kvloop_report"
"""Set here on prefill engines, in the reply: what was done with the prompt."""
RETAIN = "kvloop_retain"
"""False if the turn belongs to no conversation: nothing is pinned for it."""
EVENTS_SOCKET = "KVLOOP_EVENTS_SOCKET"
"""Environment variable with the path of the sidecar's event socket."""


@dataclass
class _Prefill:
    """What is known of one request on a prefill engine."""

    handle: bool = False
    proven: int = 0
    cached: int = 0
    pulled: int = 0
    pulled_blocks: frozenset[int] = frozenset()
    miss_reason: str | None = None


class KvloopConnector(NixlConnector):
    """NixlConnector that pulls only what it has proven."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        self._on_cpu = current_platform.device_type == "cpu"
        if self._on_cpu:
            cpu_engine.wait_without_spinning()
            cpu_engine.poll_transfers_inline()
        super().__init__(vllm_config, role, kv_cache_config)
        self._hybrid = engine_traits.is_hybrid(kv_cache_config)
        self._prefills: dict[str, _Prefill] = {}
        self._events: EngineEvents | None = None
        if role == KVConnectorRole.WORKER:
            if self._on_cpu:
                cpu_engine.use_all_cores()
            return
        path = os.environ.get(EVENTS_SOCKET)
        if path:
            self._events = EngineEvents(
                path, engine_traits.hello(self.connector_scheduler, vllm_config, kv_cache_config)
            )
        else:
            logger.warning("%s is not set: no turn can be retained for reuse", EVENTS_SOCKET)

    # ---- scheduler side: prefill -------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens to pull beyond the local prefix cache, after proof.

        vLLM asks again when it could not allocate blocks; the proof is made
        once per request.
        """
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_decode"):
            return super().get_num_new_matched_tokens(request, num_computed_tokens)
        if params.get("_remote_blocks_processed"):
            # The one read of the handle has happened: this is a request that
            # was preempted or whose read failed. Asking for tokens again would
            # make it wait for a transfer that never starts.
            return 0, False
        state = self._prefills.get(request.request_id)
        if state is None:
            state = self._prefills[request.request_id] = self._prove(request, params)
        state.cached = num_computed_tokens
        count, load_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if state.handle and not count and state.proven:
            state.miss_reason = (
                "CACHED" if state.proven <= num_computed_tokens else "BELOW_THRESHOLD"
            )
        return count, load_async

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Note what is about to be pulled."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        params = request.kv_transfer_params
        if params and not params.get("do_remote_decode"):
            # vLLM tracks a decode request only if it pulls from prefill. One
            # that computed its prompt itself is pinned at its end all the same,
            # and would never be freed.
            self.connector_scheduler._reqs_in_batch.add(request.request_id)
        state = self._prefills.get(request.request_id)
        if state is not None and num_external_tokens > 0:
            state.pulled = num_external_tokens
            state.miss_reason = None
            state.pulled_blocks = frozenset(
                block for group in blocks.get_unhashed_block_ids_all_groups() for block in group
            )

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Note pulls that failed; vLLM recomputes their tokens."""
        super().update_connector_output(connector_output)
        failed: set[str] = getattr(connector_output, "failed_recving", None) or set()
        invalid = connector_output.invalid_block_ids or set()
        for request_id in connector_output.finished_recving or ():
            state = self._prefills.get(request_id)
            if state is None:
                continue
            if request_id in failed or not state.pulled_blocks.isdisjoint(invalid):
                state.pulled = 0
                state.miss_reason = (
                    "ENGINE_EXPIRED" if _saw_expiry(connector_output) else "PULL_FAILED"
                )

    def _prove(self, request: Request, params: dict[str, Any]) -> _Prefill:
        """Find what the prompt shares with the retained sequence; cut the pull to it."""
        if not params.get("remote_block_ids"):
            return _Prefill()
        if self.connector_scheduler.use_host_buffer:
            # With a host buffer vLLM never starts a prefill engine's read, and
            # the request would wait for it.
            params["remote_block_ids"] = None
            return _Prefill(handle=True, miss_reason="INCOMPATIBLE")
        proof = Proof.from_params(params.get(PROOF))
        if proof is None or request.prompt_token_ids is None:
            params["remote_num_tokens"] = 0
            return _Prefill(handle=True, miss_reason="UNPROVABLE")
        proven = proven_tokens(proof, request.prompt_token_ids, _extra_keys(request))
        whole = proven == proof.num_tokens == params.get("remote_num_tokens")
        if not whole and not self._can_cut(params, proof):
            proven = 0
        # A pull of nothing still tells the decode engine to free its blocks.
        params["remote_num_tokens"] = proven
        if proven and not whole:
            params["remote_block_ids"] = _cut(params["remote_block_ids"], proven, proof.block_size)
        return _Prefill(
            handle=True, proven=proven, miss_reason=None if proven else "PREFIX_MISMATCH"
        )

    def _can_cut(self, params: dict[str, Any], proof: Proof) -> bool:
        """True if leading blocks alone are meaningful.

        Sliding-window and Mamba groups keep only their end, and context
        parallelism spreads a block over ranks: there it is all or nothing.
        """
        return (
            not self._hybrid
            and params.get("dcp_size", 1) == 1
            and proof.block_size == self.connector_scheduler.block_size
        )

    # ---- scheduler side: end of a request ----------------------------------

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """vLLM's hook for models with one KV cache group in older versions."""
        return self._finish(
            request, lambda: super(KvloopConnector, self).request_finished(request, block_ids)
        )

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """vLLM's hook for the end of a request."""
        return self._finish(
            request,
            lambda: super(KvloopConnector, self).request_finished_all_groups(request, block_ids),
        )

    def _finish(
        self, request: Request, finish: Callable[[], tuple[bool, dict[str, Any] | None]]
    ) -> tuple[bool, dict[str, Any] | None]:
        params = request.kv_transfer_params
        if not params:
            return finish()
        if params.get("do_remote_decode"):
            return self._finish_prefill(request, finish)
        return self._finish_decode(request, params, finish)

    def _finish_prefill(
        self, request: Request, finish: Callable[[], tuple[bool, dict[str, Any] | None]]
    ) -> tuple[bool, dict[str, Any] | None]:
        state = self._prefills.pop(request.request_id, None) or _Prefill()
        params = request.kv_transfer_params
        if params.get("remote_block_ids") and not params.get("_remote_blocks_processed"):
            # Aborted before it was scheduled: the decode engine still waits for
            # its blocks to be read. vLLM answers a decode request in this state
            # with a read of nothing, which frees them; take that way.
            params["do_remote_prefill"] = True
        delay_free, reply = finish()
        if reply is not None:
            total = request.num_prompt_tokens
            # vLLM always computes the last prompt token, to sample from it.
            pulled = min(state.pulled, max(total - 1 - state.cached, 0))
            reply[REPORT] = {
                "prompt_tokens": total,
                "proven_tokens": state.proven,
                "pulled_tokens": pulled,
                "cached_tokens": state.cached,
                "recomputed_tokens": total - state.cached - pulled,
                "miss_reason": state.miss_reason,
            }
        return delay_free, reply

    def _finish_decode(
        self,
        request: Request,
        params: dict[str, Any],
        finish: Callable[[], tuple[bool, dict[str, Any] | None]],
    ) -> tuple[bool, dict[str, Any] | None]:
        turn_id = params.get(TURN_ID)
        if params.get(RETAIN) is False and not params.get("do_remote_prefill"):
            # As vLLM does for aborted requests: the blocks are freed now.
            scheduler = self.connector_scheduler
            if hasattr(scheduler, "_stop_heartbeat"):
                scheduler._stop_heartbeat(request.request_id)
            scheduler._reqs_not_processed.add(request.request_id)
            delay_free, handle = False, None
        else:
            delay_free, handle = finish()
        if handle is not None and turn_id is not None:
            self._add_proof(request, handle)
        if turn_id is not None and self._events is not None:
            kept = handle if delay_free else None
            self._events.send(
                {
                    "type": "finished",
                    "turn_id": turn_id,
                    "retained": kept is not None,
                    "num_tokens": kept["remote_num_tokens"] if kept else 0,
                    "num_blocks": _count(kept["remote_block_ids"]) if kept else 0,
                    "ttl_seconds": engine_traits.ttl_seconds(self.connector_scheduler),
                    "params": kept,
                }
            )
        return delay_free, handle

    def _add_proof(self, request: Request, handle: dict[str, Any]) -> None:
        """Write the digests of the retained sequence into the handle."""
        tokens = list(request.all_token_ids)
        num_tokens = handle["remote_num_tokens"]
        if not self._hybrid:
            # The last token was sampled and never fed back, so it has no KV.
            # Under async scheduling vLLM may count it all the same.
            num_tokens = min(num_tokens, len(tokens) - 1)
        if not 0 < num_tokens <= len(tokens):
            return
        block_size = self.connector_scheduler.block_size
        if num_tokens != handle["remote_num_tokens"]:
            handle["remote_num_tokens"] = num_tokens
            handle["remote_block_ids"] = _cut(handle["remote_block_ids"], num_tokens, block_size)
        proof = make_proof(tokens[:num_tokens], block_size, _extra_keys(request))
        handle[PROOF] = proof.to_params()

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        """Pass releases that the sidecar asked for on to the workers.

        A deadline that has come makes every rank free its part and report so,
        just as if the blocks had been read. Unknown and freed requests are
        ignored by the workers.
        """
        if self._on_cpu:
            cpu_engine.pause_if_idle(scheduler_output.total_num_scheduled_tokens)
        if self._events is not None:
            now = time.perf_counter()
            for request_id in self._events.take_releases():
                self.connector_scheduler._reqs_need_send[request_id] = now
        return super().build_connector_meta(scheduler_output)

    # ---- worker side -------------------------------------------------------

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Finished transfers, after putting deadlines in order.

        vLLM up to 0.23 stops at the first deadline that has not come, so an
        early release behind a later one would wait for it.
        """
        worker = self.connector_worker
        if not hasattr(worker, "_reap_expired_send_leases"):
            deadlines = worker._reqs_to_send
            if len(deadlines) > 1:
                worker._reqs_to_send = dict(sorted(deadlines.items(), key=lambda item: item[1]))
        return super().get_finished(finished_req_ids)

    def shutdown(self) -> None:
        """Stop with the engine."""
        super().shutdown()
        if self._events is not None:
            self._events.close()


def _extra_keys(request: Request) -> Callable[[int, int], object] | None:
    """What besides tokens shapes the request's KV, as vLLM's own hashes see it."""
    if not (
        request.mm_features
        or request.lora_request
        or request.cache_salt
        or getattr(request, "prompt_embeds", None) is not None
    ):
        return None
    next_item = 0

    def keys(start: int, end: int) -> object:
        nonlocal next_item
        extra, next_item = generate_block_hash_extra_keys(request, start, end, next_item)
        return extra

    return keys


def _cut(block_ids: Sequence[Sequence[int]], num_tokens: int, block_size: int) -> list[list[int]]:
    """Each group's blocks that hold the first num_tokens tokens."""
    keep = -(-num_tokens // block_size)
    return [list(group[:keep]) for group in block_ids]


def _count(block_ids: Sequence[Sequence[int]]) -> int:
    return sum(len(group) for group in block_ids)


def _saw_expiry(output: KVConnectorOutput) -> bool:
    """True if the workers declined a read in this step because its deadline passed."""
    stats = output.kv_connector_stats
    data = getattr(stats, "data", None) or {}
    return bool(data.get("num_kv_expired_reqs"))
