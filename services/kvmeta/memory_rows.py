"""Conversations in memory, and what has to stay in step with them."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Collection, Iterable

from services.kvmeta.deadlines import Policy
from services.kvmeta.memory_releases import MemoryReleases
from services.kvmeta.model import Conversation, ConversationKey, ReleaseCause


class MemoryRows:
    """Rows by key, their params, how many each tenant has, and which are due.

    Args:
        policy: gives the limit of rows per tenant.
        log: where releases go.
    """

    def __init__(self, policy: Policy, log: MemoryReleases) -> None:
        self._policy = policy
        self._log = log
        self._rows: dict[ConversationKey, Conversation] = {}
        self._params: dict[ConversationKey, bytes] = {}
        self._per_tenant: Counter[str] = Counter()
        self._due: list[tuple[int, int, ConversationKey]] = []
        self._tiebreak = itertools.count()

    def get(self, key: ConversationKey) -> Conversation | None:
        """The row, if there is one."""
        return self._rows.get(key)

    def all(self) -> Collection[Conversation]:
        """Every row."""
        return self._rows.values()

    def params(self, key: ConversationKey) -> bytes:
        """The params of a row's handle."""
        return self._params[key]

    def put(self, row: Conversation, params: bytes | None = None) -> Conversation:
        """Store a row, and its handle's params if they are new; the row."""
        old = self._rows.get(row.key)
        if old is None:
            self._per_tenant[row.key.tenant] += 1
        if old is None or old.due_time_us != row.due_time_us:
            heapq.heappush(self._due, (row.due_time_us, next(self._tiebreak), row.key))
        self._rows[row.key] = row
        if params is not None:
            self._params[row.key] = params
        return row

    def forget(self, key: ConversationKey) -> None:
        """Delete a row and its params."""
        del self._rows[key]
        self._params.pop(key, None)
        self._per_tenant[key.tenant] -= 1

    def pop_due(self, now_us: int) -> Conversation | None:
        """The row that is due next, if its time has come. It is not given again
        unless its due time changes."""
        while self._due and self._due[0][0] <= now_us:
            due, _, key = heapq.heappop(self._due)
            row = self._rows.get(key)
            # Otherwise it was put off, and waits in the heap under another time.
            if row is not None and row.due_time_us == due:
                return row
        return None

    def is_full(self, tenant: str) -> bool:
        """Whether the tenant has as many rows as it may."""
        return self._per_tenant[tenant] >= self._policy.max_conversations

    def release(self, rows: Iterable[Conversation], cause: ReleaseCause, now_us: int) -> None:
        """Log a release of each row's handle."""
        for row in rows:
            self._log.write(row, self._params[row.key], cause, now_us)
