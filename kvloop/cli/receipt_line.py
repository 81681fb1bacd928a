"""A receipt as one line."""

from __future__ import annotations

from kvloop.receipts import Receipt


def receipt_line(receipt: Receipt) -> str:
    """What happened in a turn, such as

    turn 2: pulled 1,024 of 1,180 tokens from decode-0, recomputed 156 | TTFT 120 ms
    (prefill 80 + decode 40) | retained 1,230 tokens for 470 s
    """
    parts = [f"TTFT {_ms(receipt.ttft_seconds)} ms ({_legs(receipt)})"]
    if receipt.retain_outcome == "RETAINED":
        parts.append(
            f"retained {receipt.retained_tokens:,} tokens for {receipt.retained_ttl_seconds:.0f} s"
        )
    elif receipt.retain_outcome != "NOT_REQUESTED":
        parts.append(f"nothing retained: {_words(receipt.retain_outcome)}")
    head = f"turn {receipt.turn}: " if receipt.turn else ""
    return " | ".join([f"{head}{_prompt(receipt)}", *parts])


def _prompt(receipt: Receipt) -> str:
    total = receipt.prompt_tokens
    cached = f", {receipt.cached_tokens:,} cached" if receipt.cached_tokens else ""
    if receipt.pulled_tokens:
        took = f" in {_ms(receipt.pull_seconds)} ms" if receipt.pull_seconds is not None else ""
        return (
            f"pulled {receipt.pulled_tokens:,} of {total:,} tokens from "
            f"{receipt.decode_worker_id}{took}{cached}, recomputed {receipt.recomputed_tokens:,}"
        )
    why = f" ({_why(receipt, receipt.miss_reason)})" if receipt.miss_reason else ""
    return f"recomputed {receipt.recomputed_tokens:,} of {total:,} tokens{cached}{why}"


def _why(receipt: Receipt, miss_reason: str) -> str:
    pull, compute = receipt.expected_pull_seconds, receipt.expected_recompute_seconds
    if miss_reason != "SLOWER_THAN_RECOMPUTE" or pull is None or compute is None:
        return _words(miss_reason)
    return f"a pull would take {_ms(pull)} ms, computing {_ms(compute)}"


def _legs(receipt: Receipt) -> str:
    return f"prefill {_ms(receipt.prefill_leg_seconds)} + decode {_ms(receipt.decode_leg_seconds)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.0f}"


def _words(name: str) -> str:
    return name.lower().replace("_", " ")
