"""Drives the connector's proof, cut and report against one version of vLLM's sources.

Run in a process of its own, with that version first on PYTHONPATH; prints "ok".
Native code is not needed: the scheduler half of NixlConnector is plain Python.
Engine, requests and blocks are stand-ins; NixlConnector, its scheduler, block
hashing, KVTransferConfig and KV cache specs are the version's own.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

from tests.versions.stand_ins import (
    BLOCK,
    NUM_BLOCKS,
    TTL,
    Blocks,
    Events,
    make_connector,
    make_request,
    sidecar_socket,
    stand_in_for_gguf,
)


def main() -> None:
    """Play two turns and check what the connector does with them."""
    stand_in_for_gguf()
    with sidecar_socket() as listener:
        decode = make_connector("kv_consumer", "engine-d")
        events = Events(listener)
        _check_hello(events.next())
        assert events.next() == {"type": "pins", "pins": []}
        prompt = list(range(1000, 1000 + 5 * BLOCK + 3))
        handle = _first_turn(decode, events, prompt)
        prefill = make_connector("kv_producer", "engine-p")
        events_of_prefill = Events(listener)
        assert events_of_prefill.next()["engine_id"] == "engine-p"
        _second_turns(prefill, handle, [*prompt, *_answer()])
        _costs(prefill, handle, [*prompt, *_answer()])
        _deadline_extension(prefill, handle, [*prompt, *_answer()])
        _hands_token_ids_over(prefill, prompt)
        _aborted_before_prefill(prefill, handle, [*prompt, *_answer()])
        _not_retained(decode, events, prompt)
        _aborted(decode, events, prompt)
        _ended_by_a_stop_string(decode, events, prompt)
        _extra_keys_matter(decode, prefill, events, prompt)
        decode.shutdown()
        prefill.shutdown()
    sys.stdout.write("ok\n")


def _answer() -> list[int]:
    return list(range(2000, 2000 + 2 * BLOCK))


def _check_hello(hello: dict[str, Any]) -> None:
    assert hello["type"] == "hello", hello
    assert hello["engine_id"] == "engine-d"
    assert hello["block_size"] == BLOCK
    assert hello["num_kv_blocks"] == NUM_BLOCKS
    assert hello["decoder_kv_blocks_ttl"] == TTL, hello
    assert hello["bidirectional_kv_xfer"] is True
    assert hello["hybrid_kv_cache"] is False
    assert hello["pin_lease_seconds"] == (60 if hello["lease_renewal"] else 0)
    # Keys and values of two heads of 64 floats, for each token of a block.
    assert hello["kv_block_bytes"] == BLOCK * 2 * 2 * 64 * 4, hello


def _first_turn(decode: Any, events: Events, prompt: list[int]) -> dict[str, Any]:
    """A finished decode leg leaves a handle with a proof, also in its event."""
    request = make_request(prompt, {"kvloop_turn_id": "turn-1"}, output=_answer())
    decode.update_state_after_alloc(request, Blocks(8), 0)
    assert request.request_id in decode.connector_scheduler._reqs_in_batch
    delay, handle = decode.request_finished_all_groups(request, (list(range(10, 18)),))
    assert delay
    total = len(prompt) + len(_answer()) - 1
    assert handle["remote_num_tokens"] == total, handle
    assert handle["do_remote_decode"] is True
    event = events.next()
    assert event["turn_id"] == "turn-1"
    assert event["retained"] is True
    assert event["num_tokens"] == total
    assert event["num_blocks"] == -(-total // BLOCK)
    assert event["ttl_seconds"] in (60, TTL)
    assert list(event)[-1] == "params"
    assert event["params"] == json.loads(json.dumps(handle))
    return dict(event["params"])


def _second_turns(prefill: Any, handle: dict[str, Any], history: list[int]) -> None:
    """Prompts that extend, shorten, edit or replace the retained sequence."""
    total = handle["remote_num_tokens"]
    cases: list[tuple[str, list[int], int, str | None]] = [
        ("extends", [*history, 7, 8, 9], total, None),
        ("shorter", history[: 5 * BLOCK + 1], 4 * BLOCK, None),
        ("edited late", [*history[: 6 * BLOCK], 1, *history[6 * BLOCK + 1 :]], 6 * BLOCK, None),
        ("edited early", [1, *history[1:]], 0, "PREFIX_MISMATCH"),
    ]
    for name, prompt, proven, miss in cases:
        params = {**json.loads(json.dumps(handle)), "kvloop_turn_id": name}
        request = make_request(prompt, params)
        asked = prefill.get_num_new_matched_tokens(request, 0)
        assert asked == (proven, proven > 0), (name, asked)
        assert prefill.get_num_new_matched_tokens(request, 0) == asked, "asking again changes it"
        assert params["remote_num_tokens"] == proven
        if proven:
            assert [len(group) for group in params["remote_block_ids"]] == [-(-proven // BLOCK)]
        prefill.update_state_after_alloc(request, Blocks(8), proven)
        # After the one read, a preempted request must not ask for another.
        assert prefill.get_num_new_matched_tokens(request, 0) == (0, False)
        _, reply = prefill.request_finished_all_groups(request, (list(range(8)),))
        report = reply["kvloop_report"]
        assert report["proven_tokens"] == proven, (name, report)
        assert report["miss_reason"] == miss, (name, report)
        assert report["prompt_tokens"] == len(prompt)
        parts = ("pulled_tokens", "cached_tokens", "recomputed_tokens")
        assert sum(report[part] for part in parts) == len(prompt), (name, report)

    for name, cached, miss in (("cached", total, "CACHED"), ("few left", total - BLOCK, None)):
        request = make_request([*history, 7], {**json.loads(json.dumps(handle))})
        count, _ = prefill.get_num_new_matched_tokens(request, cached)
        assert count == 0, (name, count)
        prefill.update_state_after_alloc(request, Blocks(8), 0)
        _, reply = prefill.request_finished_all_groups(request, (list(range(8)),))
        assert reply["kvloop_report"]["miss_reason"] == (miss or "BELOW_THRESHOLD"), name
        assert reply["kvloop_report"]["cached_tokens"] == cached

    for broken in ({}, {"kvloop_proof": None}, {"kvloop_proof": {"version": 99}}):
        params = {key: value for key, value in handle.items() if key != "kvloop_proof"} | broken
        request = make_request([*history, 7], params)
        assert prefill.get_num_new_matched_tokens(request, 0) == (0, False), broken
        prefill.update_state_after_alloc(request, Blocks(8), 0)
        _, reply = prefill.request_finished_all_groups(request, (list(range(8)),))
        assert reply["kvloop_report"]["miss_reason"] == "UNPROVABLE"


def _costs(prefill: Any, handle: dict[str, Any], history: list[int]) -> None:
    """A pull that is dearer than computing does not take place; its blocks are freed."""
    total = handle["remote_num_tokens"]
    recompute = {"seconds_per_token": 1e-3, "seconds_per_token_and_context": 0.0}
    slow = {"latency_seconds": 0.0, "seconds_per_token": 2e-3}
    fast = {"latency_seconds": 0.0, "seconds_per_token": 1e-5}
    for pull, offered in ((slow, 0), (fast, total)):
        costs = {"pull": pull, "recompute": recompute, "probe_tokens": 0}
        params = {**json.loads(json.dumps(handle)), "kvloop_costs": costs}
        request = make_request([*history, 7, 8], params)
        asked = prefill.get_num_new_matched_tokens(request, 0)
        assert asked == (offered, offered > 0), asked
        assert prefill.get_num_new_matched_tokens(request, 0) == asked, "asking again changes it"
        prefill.update_state_after_alloc(request, Blocks(8), offered)
        read = prefill.connector_scheduler._reqs_need_recv[request.request_id]
        assert any(len(group) for group in read[1]) == (offered > 0), "blocks must be released"
        if offered:
            prefill.update_connector_output(_arrival(request.request_id))
        _, reply = prefill.request_finished_all_groups(request, (list(range(8)),))
        report = reply["kvloop_report"]
        assert report["proven_tokens"] == total
        assert report["miss_reason"] == (None if offered else "SLOWER_THAN_RECOMPUTE"), report
        assert report["recomputed_tokens"] == len(history) + 2 - offered
        assert (report["pull_seconds"] is not None) == (offered > 0), report
        assert abs(report["expected_pull_seconds"] - pull["seconds_per_token"] * total) < 1e-9
        assert abs(report["expected_recompute_seconds"] - 1e-3 * total) < 1e-9

    # So few tokens are never pulled: what they would cost is not the reason.
    costs = {"pull": slow, "recompute": recompute, "probe_tokens": 0}
    params = {**json.loads(json.dumps(handle)), "kvloop_costs": costs}
    request = make_request([*history, 7], params)
    assert prefill.get_num_new_matched_tokens(request, total - BLOCK) == (0, False)
    prefill.update_state_after_alloc(request, Blocks(8), 0)
    _, reply = prefill.request_finished_all_groups(request, (list(range(8)),))
    assert reply["kvloop_report"]["miss_reason"] == "BELOW_THRESHOLD"


def _arrival(request_id: str) -> Any:
    from vllm.v1.outputs import KVConnectorOutput

    return KVConnectorOutput(finished_recving={request_id})


def _deadline_extension(prefill: Any, handle: dict[str, Any], history: list[int]) -> None:
    """A renewed deadline is moved once, and only where there is one."""
    for deadline, extension, expected in (
        (100.0, 45.5, 145.5),
        (100.0, -1.0, 100.0),
        (100.0, float("inf"), 100.0),
        (100.0, "45", 100.0),
        (100.0, None, 100.0),
        (None, 45.5, None),
    ):
        params = json.loads(json.dumps(handle))
        params |= {"remote_blocks_expiry_time": deadline, "kvloop_deadline_extension": extension}
        request = make_request([*history, 7], params)
        for _ in range(2):
            prefill.get_num_new_matched_tokens(request, 0)
            assert params["remote_blocks_expiry_time"] == expected, (deadline, extension)


def _hands_token_ids_over(prefill: Any, prompt: list[int]) -> None:
    """Only if asked, and only of prompts that are nothing but tokens."""
    image = SimpleNamespace(identifier="x", mm_position=SimpleNamespace(offset=0, length=2))
    for asked, items, expected in (
        (True, [], prompt),
        (False, [], None),
        (True, [image], None),
    ):
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        if asked:
            params["kvloop_hand_token_ids_over"] = True
        request = make_request(prompt, params)
        request.mm_features = items
        prefill.get_num_new_matched_tokens(request, 0)
        prefill.update_state_after_alloc(request, Blocks(8), 0)
        _, reply = prefill.request_finished_all_groups(request, (list(range(8)),))
        assert reply.get("prompt_token_ids") == expected, (asked, items)


def _aborted_before_prefill(prefill: Any, handle: dict[str, Any], history: list[int]) -> None:
    """A handle whose request never ran still lets the decode engine free its blocks."""
    from vllm.v1.request import RequestStatus

    reads = prefill.connector_scheduler._reqs_need_recv
    for asked in (False, True):
        reads.clear()
        request = make_request([*history, 7], json.loads(json.dumps(handle)))
        if asked:
            prefill.get_num_new_matched_tokens(request, 0)
        request.status = RequestStatus.FINISHED_ABORTED
        assert prefill.request_finished_all_groups(request, ([],)) == (False, None)
        assert request.request_id in reads, asked
        assert not any(reads[request.request_id][1]), "it must read nothing"


def _not_retained(decode: Any, events: Events, prompt: list[int]) -> None:
    request = make_request(prompt, {"kvloop_turn_id": "no-conversation", "kvloop_retain": False})
    assert decode.request_finished_all_groups(request, ([1, 2],)) == (False, None)
    event = events.next()
    assert (event["retained"], event["params"]) == (False, None)
    assert request.request_id in decode.connector_scheduler._reqs_not_processed


def _aborted(decode: Any, events: Events, prompt: list[int]) -> None:
    from vllm.v1.request import RequestStatus

    request = make_request(prompt, {"kvloop_turn_id": "aborted"})
    request.status = RequestStatus.FINISHED_ABORTED
    assert decode.request_finished_all_groups(request, ([1, 2],)) == (False, None)
    assert events.next()["retained"] is False


def _ended_by_a_stop_string(decode: Any, events: Events, prompt: list[int]) -> None:
    """The front end aborts the request in the middle of its answer; it counts all the same."""
    from vllm.v1.request import RequestStatus

    for running_ahead in (0, 1):
        request = make_request(prompt, {"kvloop_turn_id": "stopped"}, output=_answer())
        request.status = RequestStatus.FINISHED_ABORTED
        request.num_computed_tokens += running_ahead
        delay_free, handle = decode.request_finished_all_groups(request, (list(range(8)),))
        assert delay_free
        assert request.status == RequestStatus.FINISHED_ABORTED
        event = events.next()
        assert event["retained"] is True
        assert event["num_tokens"] == len(prompt) + len(_answer()) - 1
        assert handle["kvloop_proof"]["num_tokens"] == event["num_tokens"]
        scheduler = decode.connector_scheduler
        assert request.request_id in scheduler._reqs_need_send
        assert request.request_id not in scheduler._reqs_not_processed
    # Preempted, or no conversation's turn: gone as ever.
    for changes in ({"num_computed_tokens": 0}, {"kv_transfer_params": {"kvloop_other": 1}}):
        request = make_request(prompt, {"kvloop_turn_id": "stopped"}, output=_answer())
        request.status = RequestStatus.FINISHED_ABORTED
        vars(request).update(changes)
        assert decode.request_finished_all_groups(request, ([],)) == (False, None), changes
    assert events.next()["retained"] is False


def _extra_keys_matter(decode: Any, prefill: Any, events: Events, prompt: list[int]) -> None:
    """Equal tokens under another cache salt prove nothing."""
    request = make_request(prompt, {"kvloop_turn_id": "salted"}, output=_answer(), salt="tenant-a")
    decode.request_finished_all_groups(request, (list(range(8)),))
    handle = events.next()["params"]
    for salt, proven in (("tenant-a", handle["remote_num_tokens"]), ("tenant-b", 0), (None, 0)):
        follow_up = [*prompt, *_answer(), 5]
        asking = make_request(follow_up, json.loads(json.dumps(handle)), salt=salt)
        assert prefill.get_num_new_matched_tokens(asking, 0) == (proven, proven > 0), salt


if __name__ == "__main__":
    main()
