"""The ledger's rules told once more, as plainly as they can be, to test them by."""

from __future__ import annotations

from dataclasses import dataclass, field

MARGIN = 5
RETENTION = 3600
LONGEST_TTL = 3600


@dataclass
class ModelHandle:
    name: str
    turn: int
    by: str
    worker: str
    epoch: str
    born: int
    engine_ttl: int
    retention: int
    """How long renewals can keep the blocks; 0 if they cannot."""
    drop: int
    """When the engine drops the blocks."""
    until: int
    """When the handle stops being given out."""
    extension: int = 0
    state: str = "AVAILABLE"
    evicted: bool = False
    holder: str = ""
    holder_turn: int = 0


@dataclass
class ModelConversation:
    opened: int = 0
    """Turns opened so far."""
    closed: int = 0
    """Turns that were open when the conversation was ended."""
    wanted_ttl: int | None = None
    handle: ModelHandle | None = None
    dead_since: int = 0


@dataclass
class ModelLedger:
    """Times in seconds. Takes and commits answer with short tuples."""

    now: int = 0
    engines: dict[str, str] = field(default_factory=dict)
    """Live workers and the epochs of their engines."""
    conversations: dict[str, ModelConversation] = field(default_factory=dict)
    released: list[tuple[str, str]] = field(default_factory=list)
    """Handles whose blocks were to be freed, and why."""

    def take(self, name: str, request: str) -> tuple[object, ...]:
        c = self.conversations.get(name)
        if c is None:
            return ("miss", 1, "FIRST_TURN")
        h = c.handle
        if h is not None and h.state == "TAKEN" and h.holder == request and self._usable(h):
            return ("hit", h.holder_turn, h.name)
        c.opened += 1
        if h is None:
            c.dead_since = self.now
            return ("miss", c.opened, "FIRST_TURN")
        if h.state not in ("AVAILABLE", "TAKEN"):
            c.dead_since = self.now
            return ("miss", c.opened, "EVICTED" if h.evicted else h.state)
        if h.state == "TAKEN":
            return ("miss", c.opened, "TAKEN" if self._usable(h) else "SPENT")
        if h.by == request:
            return ("miss", c.opened, "SPENT")
        if self.engines.get(h.worker) != h.epoch:
            return ("miss", c.opened, "VOID")
        if not self._usable(h):
            return ("miss", c.opened, "EXPIRED")
        h.state, h.holder, h.holder_turn = "TAKEN", request, c.opened
        return ("hit", c.opened, h.name)

    def commit(
        self,
        name: str,
        request: str,
        turn: int,
        worker: str,
        epoch: str,
        engine_ttl: int,
        retention: int,
    ) -> tuple[object, ...]:
        c = self.conversations.get(name)
        known = c or ModelConversation()
        old = known.handle
        if old is not None and old.by == request:
            elsewhere = (old.worker, old.epoch) != (worker, epoch)
            return ("superseded",) if elsewhere else ("repeated", old.name)
        if known.closed and (turn or known.opened) <= known.closed:
            return ("superseded",)
        if old is not None and turn and turn <= old.turn:
            return ("superseded",)
        if self.engines.get(worker) != epoch:
            return ("engine gone",)
        if old is not None and old.state == "AVAILABLE":
            self._release(old, "SUPERSEDED")
        number = turn or known.opened + 1
        handle_name = f"{name}-{request}-{self.now}"
        drop = self.now + engine_ttl
        known.handle = ModelHandle(
            handle_name,
            number,
            request,
            worker,
            epoch,
            self.now,
            engine_ttl,
            retention,
            drop,
            until=min(self.now + (known.wanted_ttl or retention or engine_ttl), drop - MARGIN),
        )
        known.opened = max(known.opened, number)
        self.conversations[name] = known
        return ("stored", handle_name, number)

    def give_back(self, name: str, handle_name: str, request: str) -> bool:
        c = self.conversations.get(name)
        h = c.handle if c else None
        if c is None or h is None or h.state != "TAKEN" or not self._usable(h):
            return False
        if (h.name, h.holder) != (handle_name, request):
            return False
        ended_meanwhile = h.holder_turn <= c.closed
        h.state, h.holder = ("RELEASED" if ended_meanwhile else "AVAILABLE"), ""
        if ended_meanwhile:
            c.dead_since = self.now
            self._release(h, "ENDED")
        return True

    def end(self, name: str) -> tuple[bool, bool]:
        c = self.conversations.get(name)
        if c is None:
            self.conversations[name] = ModelConversation(1, 1, dead_since=self.now)
            return (False, False)
        c.closed, c.wanted_ttl = c.opened, None
        h = c.handle
        released = h is not None and h.state == "AVAILABLE"
        if h is not None and released:
            h.state = "RELEASED"
            self._release(h, "ENDED")
        if h is not None:
            h.evicted = False
        if h is None or h.state != "TAKEN":
            c.dead_since = self.now
        return (h is not None, released)

    def extend(self, name: str, ttl: int) -> str:
        c = self.conversations.get(name)
        if c is None or c.handle is None:
            return "unknown"
        h = c.handle
        if ttl > (LONGEST_TTL if h.retention else h.engine_ttl - MARGIN):
            return "too long"
        c.wanted_ttl = ttl
        if h.state == "AVAILABLE" and self._usable(h):
            h.until = min(h.born + ttl, h.drop - MARGIN)
        return "set"

    def renew(
        self, request: str, worker: str, epoch: str, remaining: int, extension: int
    ) -> tuple[object, ...]:
        """The verdict, and for how long a WANTED pin is wanted."""
        if self.engines.get(worker) != epoch:
            return ("engine gone",)
        c = self._owner(request, worker, epoch)
        h = c.handle if c else None
        if c is None or h is None:
            return ("UNOWNED", 0)
        if h.state == "AVAILABLE" and not self._usable(h):
            self._release(h, "EXPIRED")
            h.state, c.dead_since = "EXPIRED", self.now
        if h.state == "AVAILABLE":
            wanted_until = h.born + (c.wanted_ttl or h.retention or h.engine_ttl)
            if h.retention and extension > h.extension:
                h.drop = min(self.now + remaining, h.drop + extension - h.extension)
                h.extension = extension
                h.until = min(wanted_until, h.drop - MARGIN)
            renews = h.retention and self._usable(h)
            return ("WANTED", max(0, (wanted_until if renews else h.until) - self.now))
        if h.state == "TAKEN":
            return ("IN_USE", 0)
        never_given_out = h.state != "SPENT" and not (h.state == "VOID" and h.holder)
        return ("RELEASE" if never_given_out else "UNOWNED", 0)

    def evict(self, requests: list[str], worker: str, epoch: str) -> list[str]:
        evicted = []
        for request in requests:
            c = self._owner(request, worker, epoch)
            if c is None or c.handle is None or c.handle.state != "AVAILABLE":
                continue
            self._release(c.handle, "BUDGET")
            c.handle.state, c.handle.evicted, c.dead_since = "RELEASED", True, self.now
            evicted.append(request)
        return evicted

    def register(self, worker: str, epoch: str) -> int:
        self.engines[worker] = epoch
        return sum(self._void(worker, keep=epoch, tell=False))

    def end_lease(self, worker: str) -> None:
        if self.engines.pop(worker, None) is not None:
            sum(self._void(worker, keep=None, tell=True))

    def sweep(self) -> None:
        for name, c in list(self.conversations.items()):
            h = c.handle
            if h is not None and h.state in ("AVAILABLE", "TAKEN"):
                if self._usable(h):
                    continue
                if h.state == "AVAILABLE":
                    self._release(h, "EXPIRED")
                h.state = "EXPIRED" if h.state == "AVAILABLE" else "SPENT"
                c.dead_since = self.now
            elif c.dead_since + RETENTION <= self.now:
                del self.conversations[name]

    def _owner(self, request: str, worker: str, epoch: str) -> ModelConversation | None:
        """The one conversation whose handle that turn left on that engine."""
        owners = [
            c
            for c in self.conversations.values()
            if c.handle
            and (c.handle.by, c.handle.worker, c.handle.epoch) == (request, worker, epoch)
        ]
        return owners[0] if len(owners) == 1 else None

    def _usable(self, h: ModelHandle) -> bool:
        return self.now < h.until

    def _release(self, h: ModelHandle, why: str) -> None:
        if self.now < h.drop:
            self.released.append((h.name, why))

    def _void(self, worker: str, *, keep: str | None, tell: bool) -> list[int]:
        voided = []
        for c in self.conversations.values():
            h = c.handle
            if h is None or h.worker != worker or h.epoch == keep:
                continue
            if h.state not in ("AVAILABLE", "TAKEN"):
                continue
            if tell and h.state == "AVAILABLE":
                self._release(h, "LEASE_ENDED")
            h.state, c.dead_since = "VOID", self.now
            voided.append(1)
        return voided
