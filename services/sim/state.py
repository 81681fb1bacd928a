"""What is inside an engine, as JSON for people and tests."""

from __future__ import annotations

from typing import Any

import msgspec

from services.sim.core import EngineCore
from services.sim.faults import FaultBook, Standing
from services.sim.kv import EMPTY, num_slots
from services.sim.sequence import Sequence


def engine_state(core: EngineCore, faults: FaultBook, *, with_blocks: bool) -> dict[str, Any]:
    """The engine's tables.

    Args:
        core: the engine.
        faults: its faults.
        with_blocks: whether to list every block.
    """
    now = core.now()
    pins = core.pins.all(now)
    scheduler = core.scheduler
    state: dict[str, Any] = {
        "engine_id": core.identity.engine_id,
        "epoch": core.identity.epoch,
        "kv_role": str(core.spec.kv_role),
        "model": core.spec.model,
        "connector": "stock" if core.spec.stock else "kvloop",
        "running": [_sequence(sequence) for sequence in scheduler.running],
        "loading": [_sequence(sequence) for sequence in scheduler.loading.values()],
        "waiting": [_sequence(sequence) for sequence in scheduler.waiting],
        "blocks": {
            "size": core.pool.block_size,
            "total": core.pool.num_blocks,
            "used": core.pool.num_used,
            "free": core.pool.num_free,
            "cached": sum(1 for block in core.pool.known_blocks() if core.pool.is_cached(block)),
            "pinned": core.pins.num_blocks(),
        },
        "pins": [
            {
                "request_id": pin.request_id,
                "turn_id": pin.turn_id,
                "blocks": pin.blocks,
                "expires_in_seconds": None if pin.deadline is None else pin.deadline - now,
            }
            for pin in pins
        ],
        "faults": [standing_json(standing) for standing in faults.all()],
        "faults_applied": {str(kind): count for kind, count in faults.applied.items() if count},
    }
    if with_blocks:
        state["block_table"] = [
            {
                "block": block,
                "users": core.pool.users(block),
                "cached": core.pool.is_cached(block),
                "slots": num_slots(core.pool.memory.get(block, EMPTY)),
            }
            for block in core.pool.known_blocks()
        ]
    return state


def standing_json(standing: Standing) -> dict[str, Any]:
    """A standing fault."""
    return {
        "id": standing.id,
        "applied": standing.applied,
        **msgspec.to_builtins(standing.fault),
    }


def _sequence(sequence: Sequence) -> dict[str, Any]:
    return {
        "request_id": sequence.request_id,
        "prompt_tokens": sequence.prompt_tokens,
        "answer_tokens": sequence.answer_tokens,
        "computed_tokens": sequence.computed,
        "blocks": len(sequence.blocks),
    }
