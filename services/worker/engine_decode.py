"""The connector's decode leg: what a finished turn leaves behind, and for how long.

A finished turn's blocks stay until they are read, released by the sidecar, or their
deadline comes. The sidecar is told of each of these, and may move the deadline.

Runs inside vLLM's scheduler: imports only the standard library, vLLM and siblings
that do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from services.worker.engine_sequences import DEADLINE, Finish, count, cut, extra_keys
from services.worker.proof import PROOF, make_proof

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from services.worker.engine_events import EngineEvents
    from services.worker.engine_pins import EnginePins

TURN_ID = "kvloop_turn_id"
"""Set by the sidecars on both legs; the event of a finished turn repeats it."""
RETAIN = "kvloop_retain"
"""False if the turn belongs to no conversation: nothing is pinned for it."""


class DecodeLeg:
    """All requests that end on this engine.

    Args:
        scheduler: the scheduler half of NixlConnector.
        pins: the engine's book of what it retains.
        events: the way to the sidecar; None if there is none.
        hybrid: True if some layers keep less than the whole sequence.
        lease_seconds: how long a turn is retained unless its lease is renewed; 0:
            for the engine's own TTL, and renewals are ignored.
        ttl_seconds: the engine's own TTL.
        clock: seconds on the clock of vLLM's own deadlines.
    """

    def __init__(
        self,
        scheduler: Any,
        pins: EnginePins,
        events: EngineEvents | None,
        *,
        hybrid: bool,
        lease_seconds: float,
        ttl_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._pins = pins
        self._events = events
        self._hybrid = hybrid
        self._lease_seconds = lease_seconds if events is not None else 0.0
        self._ttl_seconds = ttl_seconds
        self._clock = clock

    def allocated(self, request: Request) -> None:
        """Note a request that got its blocks.

        vLLM tracks a decode request only if it pulls from prefill. One that
        computed its prompt itself is pinned at its end all the same, and would
        never be freed.
        """
        self._scheduler._reqs_in_batch.add(request.request_id)

    def finish(
        self, request: Request, params: dict[str, Any], finish: Finish
    ) -> tuple[bool, dict[str, Any] | None]:
        """End a request; its handle gets the proof, and the sidecar the handle."""
        if params.get(RETAIN) is False and not params.get("do_remote_prefill"):
            self._free(request)
            delay_free, handle = False, None
        else:
            delay_free, handle = self._end(request, finish)
        turn_id = params.get(TURN_ID)
        kept = handle if delay_free else None
        seconds = self._ttl_seconds
        if handle is not None:  # whoever asked: no prefill engine of ours pulls without
            self._add_proof(request, handle)
        if kept is not None:
            if turn_id is not None and self._lease_seconds:
                seconds = self._lease_seconds
            self._retain(request.request_id, turn_id or "", kept, seconds)
        if turn_id is not None and self._events is not None:
            self._events.send(
                {
                    "type": "finished",
                    "turn_id": turn_id,
                    "retained": kept is not None,
                    "num_tokens": kept["remote_num_tokens"] if kept else 0,
                    "num_blocks": count(kept["remote_block_ids"]) if kept else 0,
                    "ttl_seconds": seconds,
                    "params": kept,
                }
            )
        return delay_free, handle

    def begin_step(self) -> bool:
        """Have the workers told what the sidecar asked for; True if there is anything.

        A deadline that has come makes every rank drop its part and report so, just as
        if the blocks had been read.
        """
        confirmed = self._pins.begin_step()
        if self._events is None:
            return False
        if confirmed:
            self._events.send({"type": "renewed", "pins": confirmed})
        deadlines: dict[str, float] = {}
        renewals = self._events.take_renewals()
        if renewals and self._lease_seconds:
            deadlines |= self._pins.renew(renewals)
        released = self._pins.release(self._events.take_releases())
        deadlines |= dict.fromkeys(released, self._clock())
        self._scheduler._reqs_need_send.update(deadlines)
        return bool(deadlines)

    def freed(self, request_ids: Iterable[str] | None) -> None:
        """The workers have dropped these requests' blocks."""
        freed = self._pins.freed(request_ids or ())
        if freed and self._events is not None:
            self._events.send({"type": "freed", "request_ids": freed})

    def short_of_blocks(self, blocks: int) -> None:
        """Requests lack so many blocks; say so if retained ones could make room."""
        if len(self._pins) and self._events is not None:
            self._events.send({"type": "pressure", "blocks_needed": blocks})

    def _end(self, request: Request, finish: Finish) -> tuple[bool, dict[str, Any] | None]:
        """End a request; one that the front end broke off while it answered ends well.

        At a stop string it is vLLM's front end that ends the answer, by aborting the
        request, so it looks as if the client had gone. The sidecar, which knows how
        the answer ended, releases at once what nobody will use.
        """
        answering = (
            request.status == RequestStatus.FINISHED_ABORTED
            and len(request.all_token_ids) > request.num_prompt_tokens
            and request.num_computed_tokens >= request.num_prompt_tokens
        )
        wanted = self._events is not None and request.kv_transfer_params.get(TURN_ID) is not None
        # A state that ran ahead of the tokens that are known could not be taken back.
        if not (answering and wanted) or self._hybrid:
            return finish()
        request.status = RequestStatus.FINISHED_STOPPED
        try:
            return finish()
        finally:
            request.status = RequestStatus.FINISHED_ABORTED

    def _retain(
        self, request_id: str, turn_id: str, handle: dict[str, Any], seconds: float
    ) -> None:
        deadline = self._clock() + seconds
        if turn_id and self._lease_seconds:
            # What the workers go by, and what a reader of the blocks goes by.
            self._scheduler._reqs_need_send[request_id] = deadline
            handle[DEADLINE] = deadline
        self._pins.retain(
            request_id,
            turn_id,
            num_tokens=handle["remote_num_tokens"],
            num_blocks=count(handle["remote_block_ids"]),
            deadline=deadline,
        )

    def _free(self, request: Request) -> None:
        """End a request as vLLM does if it was aborted: its blocks are freed now."""
        if hasattr(self._scheduler, "_stop_heartbeat"):
            self._scheduler._stop_heartbeat(request.request_id)
        self._scheduler._reqs_not_processed.add(request.request_id)

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
        block_size = self._scheduler.block_size
        if num_tokens != handle["remote_num_tokens"]:
            handle["remote_num_tokens"] = num_tokens
            handle["remote_block_ids"] = cut(handle["remote_block_ids"], num_tokens, block_size)
        proof = make_proof(tokens[:num_tokens], block_size, extra_keys(request))
        handle[PROOF] = proof.to_params()
