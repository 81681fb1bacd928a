"""NixlConnector with proof and leases: the part of kvloop that runs inside vLLM.

Load it into stock vLLM with

    --kv-transfer-config '{"kv_connector": "KvloopConnector",
      "kv_connector_module_path": "services.worker.connector", ...}'

On a decode engine it adds token digests to the handle of each finished turn, tells
the sidecar about it over a local socket, which works for streams too, and keeps the
turn's blocks for as long as the sidecar wants (engine_decode.py). On a prefill engine
it proves how much of a prompt the decode engine really holds, cuts the pull to that
or to less, and reports what was done (engine_prefill.py). This class is only the
place where vLLM's hooks meet these.

Nothing is imported but the standard library, vLLM, and sibling modules that do
the same. Names of vLLM that these modules rely on exist in 0.21 and in 0.33;
tests/versions drives them against the sources of several versions.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlConnector
from vllm.logger import init_logger
from vllm.platforms import current_platform

from services.worker import cpu_engine, engine_traits, engine_waits
from services.worker.engine_arrivals import Arrivals, QuietSteps
from services.worker.engine_decode import DecodeLeg
from services.worker.engine_events import EVENTS_SOCKET, EngineEvents
from services.worker.engine_idle import EngineIdle
from services.worker.engine_pins import EnginePins
from services.worker.engine_prefill import PrefillLeg
from services.worker.engine_pressure import Pressure
from services.worker.running_engine import find_running_engine

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from services.worker.engine_sequences import Finish

logger = init_logger("vllm.kvloop.connector")

_IDLE = "kvloop_idle"
"""Attribute of a step's metadata: True if the engine does nothing but retain."""
_QUIET = "kvloop_quiet"
"""Attribute of a step's metadata: True if nothing is computed, in it or beside it."""


class KvloopConnector(NixlConnector):
    """NixlConnector that pulls only what it has proven, and retains by lease."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        self._on_cpu = current_platform.device_type == "cpu"
        self._events: EngineEvents | None = None
        if self._on_cpu:
            cpu_engine.poll_transfers_inline()
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.WORKER:
            self._build_worker_half()
        else:
            self._build_scheduler_half(vllm_config, kv_cache_config)

    def _build_worker_half(self) -> None:
        self._idle_step = self._quiet_step = False
        self._arrivals = Arrivals(self.connector_worker)
        if self._on_cpu:
            cpu_engine.use_all_cores()
            poll = engine_waits.TransferPoll(self.connector_worker).poll
            engine_waits.wait_gently(lambda: True, poll)
        else:
            engine_waits.wait_gently(lambda: self._idle_step)

    def _build_scheduler_half(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
    ) -> None:
        scheduler, clock = self.connector_scheduler, time.perf_counter
        hybrid = engine_traits.is_hybrid(kv_cache_config)
        steps_in_flight = engine_traits.steps_in_flight(vllm_config)
        ttl_seconds = engine_traits.ttl_seconds(scheduler)
        if self._on_cpu:
            engine_waits.wait_gently(lambda: True)
        self._engine = find_running_engine()
        self._idle = EngineIdle(
            self._engine,
            pause_seconds=cpu_engine.PAUSE_SECONDS if self._on_cpu else 0.0,
            settle_steps=steps_in_flight + 2,
        )
        self._quiet = QuietSteps(
            steps_in_flight, lockstep=vllm_config.parallel_config.data_parallel_size > 1
        )
        self._pins = EnginePins(
            clock, steps_in_flight=steps_in_flight, longest_lease_seconds=ttl_seconds
        )
        self._pressure = Pressure(clock, scheduler.block_size)
        path = os.environ.get(EVENTS_SOCKET)
        if path:
            self._events = EngineEvents(
                path,
                engine_traits.hello(scheduler, vllm_config, kv_cache_config),
                pins=self._pins.snapshot,
                on_request=self._idle.wake,
            )
        else:
            logger.warning("%s is not set: no turn can be retained for reuse", EVENTS_SOCKET)
        self._prefill = PrefillLeg(scheduler, hybrid=hybrid, clock=clock)
        self._decode = DecodeLeg(
            scheduler,
            self._pins,
            self._events,
            hybrid=hybrid,
            lease_seconds=engine_traits.pin_lease_seconds(scheduler, vllm_config),
            ttl_seconds=ttl_seconds,
            clock=clock,
        )

    # ---- scheduler side ----------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens to pull beyond the local prefix cache."""
        self._pressure.asked(request.request_id, request.num_tokens - num_computed_tokens)
        match = super().get_num_new_matched_tokens
        if not _is_prefill_leg(request):
            return match(request, num_computed_tokens)
        return self._prefill.match(
            request, num_computed_tokens, lambda: match(request, num_computed_tokens)
        )

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """vLLM's hook for a request that got its blocks."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self._pressure.granted(request.request_id)
        if _is_prefill_leg(request):
            self._prefill.allocated(request, blocks, num_external_tokens)
        elif request.kv_transfer_params:
            self._decode.allocated(request)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """vLLM's hook for what the workers have done in a step."""
        super().update_connector_output(connector_output)
        self._prefill.arrived(connector_output)
        self._decode.freed(connector_output.finished_sending)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """vLLM's hook for models with one KV cache group in older versions."""
        finish = super().request_finished
        return self._finish(request, lambda: finish(request, block_ids))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """vLLM's hook for the end of a request."""
        finish = super().request_finished_all_groups
        return self._finish(request, lambda: finish(request, block_ids))

    def _finish(self, request: Request, finish: Finish) -> tuple[bool, dict[str, Any] | None]:
        if _is_prefill_leg(request):
            return self._prefill.finish(request, finish)
        if request.kv_transfer_params:
            return self._decode.finish(request, request.kv_transfer_params, finish)
        return finish()

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        """vLLM's hook at the end of a scheduling pass: what the workers are told."""
        scheduled = scheduler_output.total_num_scheduled_tokens
        idle = self._idle.pause(scheduled, len(self._pins))
        missing = self._pressure.blocks_missing(self._free_blocks, scheduled)
        if missing is not None:
            self._decode.short_of_blocks(missing)
        if self._decode.begin_step():
            self._idle.stir()
        meta = super().build_connector_meta(scheduler_output)
        setattr(meta, _IDLE, idle)
        setattr(meta, _QUIET, self._quiet.schedule(scheduled))
        return meta

    def _free_blocks(self) -> int | None:
        return self._engine.free_blocks() if self._engine is not None else None

    # ---- worker side -------------------------------------------------------

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """vLLM's hook at the start of a step."""
        super().bind_connector_metadata(connector_metadata)
        self._idle_step = getattr(connector_metadata, _IDLE, False)
        self._quiet_step = getattr(connector_metadata, _QUIET, False)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Transfers that have ended, in versions that ask for them so."""
        self._before_transfers_are_told()
        return super().get_finished(finished_req_ids)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Transfers that have ended, in versions that tell failures apart."""
        self._before_transfers_are_told()
        return super().get_transfer_results(finished_req_ids)

    def _before_transfers_are_told(self) -> None:
        """Wait a little for those under way in a step that has nothing else to do.

        Deadlines are put in order, too: older versions stop at the first that has not
        come, so an early release behind a later one would wait for it.
        """
        if self._quiet_step:
            self._arrivals.wait()
        worker = self.connector_worker
        if not hasattr(worker, "_reap_expired_send_leases"):
            deadlines = worker._reqs_to_send
            if len(deadlines) > 1:
                worker._reqs_to_send = dict(sorted(deadlines.items(), key=lambda item: item[1]))

    def shutdown(self) -> None:
        """Stop with the engine."""
        super().shutdown()
        if self._events is not None:
            self._events.close()


def _is_prefill_leg(request: Request) -> bool:
    """True if another engine goes on with this request's KV."""
    params = request.kv_transfer_params
    return bool(params and params.get("do_remote_decode"))
