"""What a prefill engine's reply hands over, and what it reports. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import msgspec

from kvloop.errors import InternalError


class MissingHandoff(StrEnum):
    """Why a reply carries nothing for decode to pull."""

    ABSENT = "absent"
    """The reply has no kv_transfer_params: the endpoint or the engine's version
    does not support them."""
    NULL = "null"
    """kv_transfer_params is null: no connector is loaded, or the request did
    not end the way the connector expects."""


class PrefillReport(msgspec.Struct, frozen=True):
    """What the engine did with the prompt; see kvloop.common.v1.PrefillReport."""

    prompt_tokens: int = 0
    proven_tokens: int = 0
    pulled_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    miss_reason: str | None = None
    """Name of a MissReason without its prefix; None if it was no miss."""
    pull_seconds: float | None = None
    """From the decision to pull to the last block; None if nothing was pulled."""
    expected_pull_seconds: float | None = None
    """For all that was proven and not cached; None while the link is unknown."""
    expected_recompute_seconds: float | None = None
    """For the same tokens; None while the engine's speed is unknown."""


@dataclass(frozen=True)
class Handoff:
    """The part of a prefill reply that matters."""

    params: bytes
    """kv_transfer_params as the engine wrote them; empty if missing."""
    missing: MissingHandoff | None
    report: PrefillReport
    reported: bool
    """False if kvloop's connector added no report; token counts are then the
    engine's usage, as if all had been computed."""


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0


class _Reply(msgspec.Struct):
    usage: _Usage | None = None
    kv_transfer_params: msgspec.Raw = msgspec.Raw()  # b"" if absent


class _Params(msgspec.Struct):
    kvloop_report: PrefillReport | None = None


_REPLY = msgspec.json.Decoder(_Reply)
_PARAMS = msgspec.json.Decoder(_Params)


def read_reply(reply: bytes) -> Handoff:
    """Take a prefill reply apart.

    Raises:
        InternalError: ENGINE_FAILED, the reply is not what the endpoint promises.
    """
    try:
        found = _REPLY.decode(reply)
        params = bytes(found.kv_transfer_params)
        missing = None
        if not params:
            missing = MissingHandoff.ABSENT
        elif params == b"null":
            params, missing = b"", MissingHandoff.NULL
        report = _PARAMS.decode(params).kvloop_report if params else None
    except msgspec.DecodeError as error:
        raise InternalError(
            f"the engine's prefill reply cannot be read: {error}", reason="ENGINE_FAILED"
        ) from error
    if report is not None:
        return Handoff(params, missing, report, reported=True)
    tokens = found.usage.prompt_tokens if found.usage is not None else 0
    counted = PrefillReport(prompt_tokens=tokens, recomputed_tokens=tokens)
    return Handoff(params, missing, counted, reported=False)
