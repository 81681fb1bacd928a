"""The connector's prefill leg: prove, decide what to pull, cut, and report.

Runs inside vLLM's scheduler: imports only the standard library, vLLM and siblings
that do the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from services.worker.engine_sequences import DEADLINE, Finish, cut, extra_keys
from services.worker.proof import PROOF, Proof, proven_tokens
from services.worker.pull_plan import COSTS, SLOWER_THAN_RECOMPUTE, plan

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

REPORT = "kvloop_report"
"""Set here, in the reply: what was done with the prompt."""
DEADLINE_EXTENSION = "kvloop_deadline_extension"
"""Set by the sidecar: by how many seconds the handle's deadline has been moved."""
HAND_TOKEN_IDS_OVER = "kvloop_hand_token_ids_over"
"""Set by the sidecar: true if decode takes the prompt as token ids."""
TOKEN_IDS = "prompt_token_ids"
"""Set here, in the reply, if so: vLLM's own name for them in the params of decode."""


@dataclass
class _Prefill:
    """What is known of one request."""

    handle: bool = False
    proven: int = 0
    held_back: bool = False
    """True if less than what is proven is offered, because computing is faster."""
    expected_pull_seconds: float | None = None
    expected_recompute_seconds: float | None = None
    cached: int = 0
    pulled: int = 0
    pulled_blocks: frozenset[int] = frozenset()
    pull_started: float | None = None
    pull_seconds: float | None = None
    miss_reason: str | None = None

    def report(self, prompt_tokens: int) -> dict[str, Any]:
        """What the sidecar is told."""
        # vLLM always computes the last prompt token, to sample from it.
        pulled = min(self.pulled, max(prompt_tokens - 1 - self.cached, 0))
        return {
            "prompt_tokens": prompt_tokens,
            "proven_tokens": self.proven,
            "pulled_tokens": pulled,
            "cached_tokens": self.cached,
            "recomputed_tokens": prompt_tokens - self.cached - pulled,
            "miss_reason": self.miss_reason,
            "pull_seconds": self.pull_seconds,
            "expected_pull_seconds": self.expected_pull_seconds,
            "expected_recompute_seconds": self.expected_recompute_seconds,
        }


class PrefillLeg:
    """All requests that a decode engine will go on with.

    Args:
        scheduler: the scheduler half of NixlConnector.
        hybrid: True if some layers keep less than the whole sequence.
        clock: seconds, for durations.
    """

    def __init__(self, scheduler: Any, *, hybrid: bool, clock: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._hybrid = hybrid
        self._clock = clock
        self._prefills: dict[str, _Prefill] = {}

    def match(
        self,
        request: Request,
        num_computed_tokens: int,
        match: Callable[[], tuple[int | None, bool]],
    ) -> tuple[int | None, bool]:
        """Tokens to pull beyond the local prefix cache, after proof.

        vLLM asks again when it could not allocate blocks; proof and decision are
        made once per request.

        Args:
            request: it is a prefill leg.
            num_computed_tokens: tokens in the local prefix cache.
            match: NixlConnector's own answer.
        """
        params = request.kv_transfer_params
        if params.get("_remote_blocks_processed"):
            # The one read of the handle has happened: this is a request that
            # was preempted or whose read failed. Asking for tokens again would
            # make it wait for a transfer that never starts.
            return 0, False
        state = self._prefills.get(request.request_id)
        if state is None:
            state = self._prove(request, params, num_computed_tokens)
            self._prefills[request.request_id] = state
        state.cached = num_computed_tokens
        count, load_async = match()
        if state.handle and not count and state.proven:
            state.miss_reason = self._why_not(state, num_computed_tokens)
        return count, load_async

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Note what is about to be pulled."""
        state = self._prefills.get(request.request_id)
        if state is not None and num_external_tokens > 0:
            state.pulled = num_external_tokens
            state.pull_started = self._clock()
            state.miss_reason = None
            state.pulled_blocks = frozenset(
                block for group in blocks.get_unhashed_block_ids_all_groups() for block in group
            )

    def arrived(self, output: KVConnectorOutput) -> None:
        """Note pulls that ended. vLLM recomputes the tokens of those that failed."""
        failed: set[str] = getattr(output, "failed_recving", None) or set()
        invalid = output.invalid_block_ids or set()
        for request_id in output.finished_recving or ():
            state = self._prefills.get(request_id)
            if state is None:
                continue
            if request_id in failed or not state.pulled_blocks.isdisjoint(invalid):
                state.pulled = 0
                state.miss_reason = "ENGINE_EXPIRED" if _saw_expiry(output) else "PULL_FAILED"
            elif state.pull_started is not None:
                state.pull_seconds = self._clock() - state.pull_started

    def finish(self, request: Request, finish: Finish) -> tuple[bool, dict[str, Any] | None]:
        """End a request; its reply gets the report."""
        state = self._prefills.pop(request.request_id, None) or _Prefill()
        params = request.kv_transfer_params
        if params.get("remote_block_ids") and not params.get("_remote_blocks_processed"):
            # Aborted before it was scheduled: the decode engine still waits for
            # its blocks to be read. vLLM answers a decode request in this state
            # with a read of nothing, which frees them; take that way.
            params["do_remote_prefill"] = True
        delay_free, reply = finish()
        if reply is not None:
            reply[REPORT] = state.report(request.num_prompt_tokens)
            if params.get(HAND_TOKEN_IDS_OVER) and self._knows_whole_prompt(request):
                reply[TOKEN_IDS] = list(request.prompt_token_ids)
        return delay_free, reply

    def _knows_whole_prompt(self, request: Request) -> bool:
        """True if the prompt is its token ids and nothing else.

        Of hybrid models vLLM leaves the last tokens to decode, and drops them here.
        """
        return not self._hybrid and request.prompt_token_ids is not None and not request.mm_features

    def _prove(self, request: Request, params: dict[str, Any], cached: int) -> _Prefill:
        """Find what the prompt shares with the retained sequence; offer that or less."""
        if not params.get("remote_block_ids"):
            return _Prefill()
        if self._scheduler.use_host_buffer:
            # With a host buffer vLLM never starts a prefill engine's read, and
            # the request would wait for it.
            params["remote_block_ids"] = None
            return _Prefill(handle=True, miss_reason="INCOMPATIBLE")
        _move_deadline(params)
        proof = Proof.from_params(params.get(PROOF))
        if proof is None or request.prompt_token_ids is None:
            params["remote_num_tokens"] = 0
            return _Prefill(handle=True, miss_reason="UNPROVABLE")
        proven = proven_tokens(proof, request.prompt_token_ids, extra_keys(request))
        whole = proof.num_tokens == params.get("remote_num_tokens")
        can_cut = self._can_cut(params, proof)
        if not can_cut and not (whole and proven == proof.num_tokens):
            proven = 0
        chosen = plan(
            params.get(COSTS),
            proven=proven,
            cached=cached,
            prompt=request.num_prompt_tokens,
            block_size=proof.block_size,
        )
        offered = min(chosen.tokens, proven)
        if offered < proven and not can_cut:
            offered = 0
        if offered and not (whole and offered == proof.num_tokens):
            params["remote_block_ids"] = cut(params["remote_block_ids"], offered, proof.block_size)
        # A pull of nothing still tells the decode engine to free its blocks.
        params["remote_num_tokens"] = offered
        return _Prefill(
            handle=True,
            proven=proven,
            held_back=offered < proven,
            expected_pull_seconds=chosen.expected_pull_seconds,
            expected_recompute_seconds=chosen.expected_recompute_seconds,
            miss_reason=None if proven else "PREFIX_MISMATCH",
        )

    def _why_not(self, state: _Prefill, cached: int) -> str:
        """Why nothing is pulled of what is proven."""
        left = state.proven - cached
        if left <= 0:
            return "CACHED"
        if state.held_back and left >= self._scheduler.kv_recompute_threshold:
            return SLOWER_THAN_RECOMPUTE
        return "BELOW_THRESHOLD"

    def _can_cut(self, params: dict[str, Any], proof: Proof) -> bool:
        """True if leading blocks alone are meaningful.

        Sliding-window and Mamba groups keep only their end, and context
        parallelism spreads a block over ranks: there it is all or nothing.
        """
        return (
            not self._hybrid
            and params.get("dcp_size", 1) == 1
            and proof.block_size == self._scheduler.block_size
        )


def _move_deadline(params: dict[str, Any]) -> None:
    """Let vLLM's check of the deadline see by how much it was renewed."""
    deadline, extension = params.get(DEADLINE), params.get(DEADLINE_EXTENSION)
    if _is_number(deadline) and _is_number(extension) and extension > 0:
        params[DEADLINE] = deadline + extension


def _is_number(value: object) -> TypeGuard[float]:
    return type(value) in (int, float) and math.isfinite(cast(float, value))


def _saw_expiry(output: KVConnectorOutput) -> bool:
    """True if the workers declined a read in this step because its deadline passed."""
    stats = output.kv_connector_stats
    data = getattr(stats, "data", None) or {}
    return bool(data.get("num_kv_expired_reqs"))
