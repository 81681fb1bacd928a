"""Until when a handle is given out: pure functions.

Two deadlines meet in it. The conversation's own says how long the retained KV is
wanted; the engine's says how long the blocks are there. Renewals move the second
one towards the first, a lease at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.kvmeta.model import Commit, Conversation, HandleState


@dataclass(frozen=True, slots=True)
class Policy:
    """The deployment's durations, in microseconds."""

    handle_margin_us: int
    """Handles stop being given out this much before the engine's deadline."""
    handle_ttl_us: int | None
    """How long handles are given out at most; None for as long as their worker
    keeps the blocks."""
    max_retention_us: int
    """Longest TTL that a conversation with a renewable pin may have."""
    dead_retention_us: int
    """How long a row without a usable handle is remembered."""
    release_retention_us: int
    """How long a release is remembered."""
    max_conversations: int
    """Rows that one tenant may have."""


def margin_us(engine_ttl_us: int, policy: Policy) -> int:
    """Safety margin before the engine's deadline: at most a tenth of its TTL.

    The margin covers the pull itself, the commit's way to the ledger and the
    drift between two clocks. With a TTL of seconds those are small too.
    """
    return min(policy.handle_margin_us, engine_ttl_us // 10)


def wanted_ttl_us(
    engine_ttl_us: int, retention_ttl_us: int, conversation_ttl_us: int | None, policy: Policy
) -> int:
    """How long after its commit a handle is wanted, whatever the engine does."""
    if conversation_ttl_us is not None:
        return conversation_ttl_us
    if policy.handle_ttl_us is not None:
        return policy.handle_ttl_us
    return retention_ttl_us or engine_ttl_us


def wanted_until_us(row: Conversation, policy: Policy) -> int:
    """The conversation's own deadline: a pin is renewed up to it."""
    return row.commit_time_us + wanted_ttl_us(
        row.engine_ttl_us, row.retention_ttl_us, row.conversation_ttl_us, policy
    )


def expire_time_us(
    wanted_until_us: int, drop_time_us: int, engine_ttl_us: int, policy: Policy
) -> int:
    """When a handle stops being given out: at its conversation's deadline, or a
    margin before the engine drops the blocks."""
    return min(wanted_until_us, drop_time_us - margin_us(engine_ttl_us, policy))


def committed_expire_us(
    commit: Commit, conversation_ttl_us: int | None, now_us: int, policy: Policy
) -> int:
    """When the handle of a commit stops being given out unless it is renewed."""
    wanted = wanted_ttl_us(
        commit.engine_ttl_us, commit.retention_ttl_us, conversation_ttl_us, policy
    )
    drop = now_us + commit.engine_ttl_us
    return expire_time_us(now_us + wanted, drop, commit.engine_ttl_us, policy)


def given_out_until_us(row: Conversation, now_us: int, policy: Policy) -> int:
    """When a handle stops being given out if its worker renews the pin as it should."""
    usable = row.state is HandleState.AVAILABLE and row.expire_time_us > now_us
    if usable and row.retention_ttl_us > 0:
        return wanted_until_us(row, policy)
    return row.expire_time_us


def longest_ttl_us(row: Conversation, policy: Policy) -> int:
    """The longest TTL that the conversation can be given."""
    if row.retention_ttl_us > 0:
        return max(policy.max_retention_us, row.retention_ttl_us)
    return row.engine_ttl_us - margin_us(row.engine_ttl_us, policy)
