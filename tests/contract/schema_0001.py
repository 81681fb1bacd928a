"""A database as revision 0001 of the schema left it, written without our code."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

SECOND = 1_000_000
NOW_US = 1_800_000_000 * SECOND

PARAMS = {number: b'{"remote_block_ids":[[%d]],"x":1.50,"y":null}' % number for number in range(8)}

_TRAITS = {
    "vllm_version": "0.32.0",
    "contract_version": 1,
    "block_size": 32,
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "kv_connector": "KvloopConnector",
    "kv_buffer_device": "cuda",
    "side_channel_host": "10.0.0.7",
    "side_channel_port": 5700,
    "max_model_len": 4096,
    "num_kv_blocks": 2**40,
    "bidirectional_kv_xfer": True,
    "decoder_kv_blocks_ttl_us": 480 * SECOND,
    "kv_recompute_threshold": 64,
    "hybrid_kv_cache": False,
    "lease_renewal": False,
    "kv_cache_dtype": "auto",
    "nixl_version": "1.5.1",
}


def _conversation(number: int, state: str, **values: Any) -> dict[str, Any]:
    """A row committed `number` seconds before NOW_US, by turn 2 of request r<number>."""
    committed = NOW_US - number * SECOND
    return {
        "tenant": "t",
        "model": "m",
        "conversation_id": state.lower(),
        "issued_turn": 2,
        "ended_turn": 0,
        "conversation_ttl_us": None,
        "state": state,
        "turn": 2,
        "handle_id": f"handle-{number}",
        "worker_id": "d1",
        "engine_id": "engine-1",
        "epoch": "epoch-1",
        "num_tokens": 64 + number,
        "num_blocks": 2,
        "take_request_id": "",
        "take_turn": 0,
        "commit_request_id": f"r{number}",
        "commit_revision": committed,
        "commit_time_us": committed,
        "expire_time_us": committed + 475 * SECOND,
        "engine_ttl_us": 480 * SECOND,
        "due_time_us": committed + 475 * SECOND,
        "revision": committed + 7,
        "params_id": number,
    } | values


CONVERSATIONS = [
    _conversation(1, "AVAILABLE"),
    _conversation(2, "TAKEN", issued_turn=3, take_request_id="holder", take_turn=3),
    _conversation(3, "SPENT", take_request_id="gone", take_turn=3, issued_turn=3),
    _conversation(4, "RELEASED", ended_turn=2, due_time_us=NOW_US + 3600 * SECOND),
    _conversation(5, "EXPIRED", due_time_us=NOW_US + 3600 * SECOND),
    _conversation(6, "VOID", worker_id="d0", due_time_us=NOW_US + 3600 * SECOND),
    _conversation(
        7,
        "AVAILABLE",
        tenant="u",
        conversation_id="own ttl",
        conversation_ttl_us=60 * SECOND,
        expire_time_us=NOW_US + 53 * SECOND,
        due_time_us=NOW_US + 53 * SECOND,
    ),
    # Ended before its first turn was committed.
    _conversation(
        0,
        "RELEASED",
        tenant="u",
        conversation_id="tombstone",
        issued_turn=1,
        ended_turn=1,
        turn=0,
        handle_id="",
        worker_id="",
        engine_id="",
        epoch="",
        num_tokens=0,
        num_blocks=0,
        commit_request_id="",
        commit_revision=0,
        commit_time_us=0,
        expire_time_us=0,
        engine_ttl_us=0,
        due_time_us=NOW_US + 3600 * SECOND,
        params_id=None,
    ),
]


def _worker(worker_id: str, revision: int, **values: Any) -> dict[str, Any]:
    return {
        "worker_id": worker_id,
        "role": "DECODE",
        "address": "10.0.0.7:7400",
        "model": "m",
        "engine_id": "engine-1",
        "epoch": "epoch-1",
        "traits": _TRAITS,
        "state": "ACTIVE",
        "lease_id": f"lease-{worker_id}",
        "lease_ttl_us": 15 * SECOND,
        "lease_expire_us": NOW_US + 15 * SECOND,
        "removed": False,
        "revision": revision,
    } | values


WORKERS = [
    _worker("d1", 4),
    _worker("p1", 5, role="PREFILL", engine_id="engine-2", state="DRAINING"),
    _worker("d0", 6, engine_id="engine-0", removed=True, lease_expire_us=NOW_US - SECOND),
]


def _release(revision: int, number: int, cause: str) -> dict[str, Any]:
    return {
        "revision": revision,
        "worker_id": "d1",
        "engine_id": "engine-1",
        "epoch": "epoch-1",
        "handle_id": f"handle-{number}",
        "turn": 2,
        "params_id": number,
        "num_tokens": 64 + number,
        "num_blocks": 2,
        "cause": cause,
        "due_time_us": NOW_US + 1000 * SECOND,
    }


RELEASES = [_release(11, 4, "ENDED"), _release(12, 5, "EXPIRED")]

_ROWS: dict[str, list[dict[str, Any]]] = {
    "conversations": CONVERSATIONS,
    "handle_params": [
        {"params_id": number, "params": params, "due_time_us": NOW_US + 1680 * SECOND}
        for number, params in PARAMS.items()
        if number
    ],
    "releases": RELEASES,
    "release_floors": [{"worker_id": "d1", "revision": 10}],
    "workers": WORKERS,
    "tenants": [{"tenant": "t", "conversations": 6}, {"tenant": "u", "conversations": 2}],
    "ledger_clock": [
        {"id": 1, "ledger_us": NOW_US, "wall_us": NOW_US + 5, "boot_id": "b", "uptime_us": 9}
    ],
}


def fill(connection: sa.Connection) -> None:
    """Write the rows into a database at revision 0001."""
    found = sa.MetaData()
    found.reflect(connection)
    for name, rows in _ROWS.items():
        for row in rows:  # one by one: each has its own nulls
            connection.execute(sa.insert(found.tables[name]), row)
    counters = found.tables["counters"]
    for name, value in (("releases", 12), ("registry", 6)):
        statement = sa.update(counters).where(counters.c.name == name)
        connection.execute(statement.values(value=value))
