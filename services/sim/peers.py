"""How engines reach each other's blocks: the port, and the side that is read from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.sim.blocks import BlockPool
from services.sim.kv import Content
from services.sim.pins import PinTable
from services.sim.spec import EngineSpec, Identity


class PeerError(Exception):
    """The other engine cannot be reached, or refuses."""


@dataclass(frozen=True)
class PeerInfo:
    """What a handshake tells."""

    engine_id: str
    epoch: str
    clock: float
    """The engine's clock at the handshake."""


class Peers(Protocol):
    """Access to other engines by the address of their side channel.

    `epoch` is the one learnt by the handshake: a peer that was restarted since
    refuses, as NIXL fails on memory that is no longer registered.

    All calls raise:
        PeerError: the peer cannot be reached or refuses.
    """

    async def meet(self, host: str, port: int) -> PeerInfo:
        """Shake hands."""

    async def read(
        self, host: str, port: int, epoch: str, blocks: Sequence[int], request_id: str
    ) -> list[Content]:
        """Read blocks by number, whosever they are, and tell the peer that the
        request's blocks have been read."""

    async def notify(self, host: str, port: int, epoch: str, request_id: str) -> None:
        """Tell the peer that a request's blocks are not needed."""

    async def renew(self, host: str, port: int, epoch: str, request_ids: Sequence[str]) -> None:
        """Ask the peer to keep requests' blocks for longer."""


class SideChannel:
    """The side of one engine that other engines talk to.

    Args:
        spec: the engine.
        identity: its life.
        pool: its blocks.
        pins: what it keeps for others.
        now: the engine's clock.
        on_change: called when blocks have been freed.
    """

    def __init__(
        self,
        spec: EngineSpec,
        identity: Identity,
        pool: BlockPool,
        pins: PinTable,
        now: Callable[[], float],
        on_change: Callable[[], None],
    ) -> None:
        self._spec = spec
        self._identity = identity
        self._pool = pool
        self._pins = pins
        self._now = now
        self._on_change = on_change

    def meet(self) -> PeerInfo:
        """Answer a handshake."""
        return PeerInfo(self._identity.engine_id, self._identity.epoch, self._now())

    def read(self, epoch: str, blocks: Sequence[int], request_id: str) -> list[Content]:
        """Give out what the blocks hold now, then free the request's pin.

        Raises:
            PeerError: the reader knows another life of this engine, or there is
                no such block.
        """
        self._require(epoch)
        self._pins.expire(self._now())
        try:
            contents = self._pool.read(blocks)
        except IndexError as error:
            raise PeerError(f"no such block: {error}") from error
        self.notify(epoch, request_id)
        return contents

    def notify(self, epoch: str, request_id: str) -> None:
        """Free a request's pin.

        Raises:
            PeerError: the sender knows another life of this engine.
        """
        self._require(epoch)
        self._pins.notify(request_id, self._now())
        self._on_change()

    def renew(self, epoch: str, request_ids: Sequence[str]) -> None:
        """Keep pins for two thirds of a lease from now.

        Raises:
            PeerError: the sender knows another life of this engine.
        """
        self._require(epoch)
        now = self._now()
        if self._spec.renews_leases:
            self._pins.renew(request_ids, now + self._spec.kv_lease_seconds * 2 / 3, now)

    def _require(self, epoch: str) -> None:
        if epoch != self._identity.epoch:
            raise PeerError("the engine has been restarted since the handshake")
