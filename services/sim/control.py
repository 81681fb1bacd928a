"""What can be done to an engine from outside, and how it is asked for."""

from __future__ import annotations

from typing import Annotated, Protocol

import msgspec

from services.sim.api_errors import ApiError
from services.sim.link import Link


class EngineControl(Protocol):
    """One engine, over all of its lives."""

    def start(self) -> None:
        """Begin a new life after `exit`. An engine that is up is left alone."""

    def restart(self, after_seconds: float) -> None:
        """End the engine's life at once; begin another one later."""

    def exit(self) -> None:
        """End the engine's life; begin another one only after `start`."""

    def refuse(self, seconds: float) -> None:
        """Take no new connections for a while."""

    def set_link(self, link: Link) -> None:
        """Change how fast the engine reads others' blocks, from the next read on."""

    def hang_up(self, client: tuple[str, int]) -> None:
        """Close the connection with a client, whatever it waits for."""


class Start(msgspec.Struct, tag_field="action", tag="start"):
    """Begin a new life."""


class Restart(msgspec.Struct, tag_field="action", tag="restart"):
    """End the engine and begin a new life after `seconds`."""

    seconds: float = 0.0


class Refuse(msgspec.Struct, tag_field="action", tag="refuse"):
    """Take no connections for `seconds`."""

    seconds: float


class Exit(msgspec.Struct, tag_field="action", tag="exit"):
    """End the engine for good."""


class SetLink(msgspec.Struct, tag_field="action", tag="link"):
    """Change how fast other engines' blocks are read. What is left out is the
    profile's."""

    bytes_per_second: Annotated[float, msgspec.Meta(ge=0)] | None = None
    transfer_seconds: Annotated[float, msgspec.Meta(ge=0)] | None = None


Order = Start | Restart | Refuse | Exit | SetLink

_ORDER = msgspec.json.Decoder(Order)


def read_order(body: bytes) -> Order:
    """An order written as {"action": ..., "seconds": ...}.

    Raises:
        ApiError: it is none.
    """
    try:
        return _ORDER.decode(body)
    except msgspec.DecodeError as error:
        raise ApiError(str(error)) from error


def carry_out(order: Order, control: EngineControl) -> None:
    """Do to an engine what is ordered."""
    match order:
        case Start():
            control.start()
        case Restart():
            control.restart(order.seconds)
        case Refuse():
            control.refuse(order.seconds)
        case Exit():
            control.exit()
        case SetLink():
            control.set_link(Link(order.bytes_per_second, order.transfer_seconds))
