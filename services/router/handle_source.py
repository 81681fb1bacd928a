"""Where a handle's transfer params lead, compared with who is registered there.

The ledger keeps params as the bytes that came, and prefill engines read from the
address that the params name. So before an engine sees them they have to name the
worker that holds the handle, as it has registered itself: nobody who can write
to the ledger, or to what it is kept in, sends an engine anywhere else.
"""

from __future__ import annotations

import msgspec

from kvloop.kvmeta.v1 import registry_pb2


class _Source(msgspec.Struct):
    """What an engine connects to. A part that is absent leads nowhere."""

    remote_engine_id: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None


_DECODER = msgspec.json.Decoder(_Source)


def foreign_source(params: bytes, holder: registry_pb2.Worker) -> str | None:
    """Which part of the params does not lead to the worker; None if all do.

    Args:
        params: a handle's transfer params.
        holder: the worker that the ledger says holds its KV.
    """
    try:
        source = _DECODER.decode(params)
    except msgspec.DecodeError:  # a port that is no number, among others
        return "form"
    registered = {
        "remote_engine_id": holder.engine.engine_id,
        "remote_host": holder.traits.side_channel_host,
        "remote_port": holder.traits.side_channel_port,
    }
    for part, expected in registered.items():
        if getattr(source, part) not in (None, expected):
            return part
    return None
