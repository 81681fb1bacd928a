"""A receipt as one line says what matters."""

from __future__ import annotations

from dataclasses import replace

from kvloop.cli.receipt_line import receipt_line
from kvloop.receipts import Receipt

PULLED = Receipt(
    turn_id="t",
    turn=2,
    prefill_worker_id="prefill-0",
    decode_worker_id="decode-0",
    handle_hit=True,
    miss_reason=None,
    prompt_tokens=1180,
    proven_tokens=1024,
    pulled_tokens=1024,
    cached_tokens=0,
    recomputed_tokens=156,
    ttft_seconds=0.12,
    prefill_leg_seconds=0.08,
    decode_leg_seconds=0.04,
    retain_outcome="RETAINED",
    retained_tokens=1230,
    retained_ttl_seconds=470.2,
)


def test_pull() -> None:
    assert receipt_line(PULLED) == (
        "turn 2: pulled 1,024 of 1,180 tokens from decode-0, recomputed 156"
        " | TTFT 120 ms (prefill 80 + decode 40)"
        " | retained 1,230 tokens for 470 s"
    )


def test_miss_names_its_reason_and_the_cache() -> None:
    receipt = replace(
        PULLED,
        turn=1,
        miss_reason="FIRST_TURN",
        pulled_tokens=0,
        cached_tokens=32,
        recomputed_tokens=1148,
    )
    assert receipt_line(receipt).startswith(
        "turn 1: recomputed 1,148 of 1,180 tokens, 32 cached (first turn)"
    )


def test_turn_outside_a_conversation_retains_nothing_and_says_nothing_of_it() -> None:
    receipt = replace(PULLED, turn=0, retain_outcome="NOT_REQUESTED")
    line = receipt_line(receipt)
    assert line.startswith("pulled")
    assert "retained" not in line


def test_kv_that_could_not_be_retained_is_told() -> None:
    receipt = replace(PULLED, retain_outcome="LEDGER_UNAVAILABLE")
    assert receipt_line(receipt).endswith("| nothing retained: ledger unavailable")


def test_a_pull_says_how_long_it_took() -> None:
    line = receipt_line(replace(PULLED, pull_seconds=0.0223))
    assert line.startswith("turn 2: pulled 1,024 of 1,180 tokens from decode-0 in 22 ms, recomp")


def test_a_pull_that_was_held_back_says_what_it_would_have_taken() -> None:
    receipt = replace(
        PULLED,
        miss_reason="SLOWER_THAN_RECOMPUTE",
        pulled_tokens=0,
        recomputed_tokens=1180,
        expected_pull_seconds=4.0,
        expected_recompute_seconds=0.28,
    )
    assert receipt_line(receipt).startswith(
        "turn 2: recomputed 1,180 of 1,180 tokens (a pull would take 4,000 ms, computing 280)"
    )
