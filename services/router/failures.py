"""What a failed call means for the handle, the worker and the next attempt."""

from __future__ import annotations

from kvloop.errors import InternalError, InvalidFieldError, KvloopError

WORKER_UNREACHABLE = "WORKER_UNREACHABLE"
"""No connection could be made, so nothing was sent."""
WORKER_LOST = "WORKER_LOST"
"""The connection broke under a call; what the worker had done by then is unknown."""
WORKER_SILENT = "WORKER_SILENT"
"""The worker said nothing for so long that its leg was given up."""

_DRAINING = "DRAINING"
_NOT_REACHED = frozenset({WORKER_UNREACHABLE, "ENGINE_UNREACHABLE", _DRAINING, "WRONG_ROLE"})
"""The worker says, or it is certain, that its engine never saw the request."""
_NO_ENDPOINT = "ENDPOINT_UNSUPPORTED"
_ENGINE_LOST = "ENGINE_LOST"
_LOST = frozenset({WORKER_LOST, WORKER_SILENT, _ENGINE_LOST})
"""The worker or its engine went away under a call, or hangs."""


def engine_not_reached(error: KvloopError) -> bool:
    """True if it is certain that the engine never saw the request."""
    return error.reason in _NOT_REACHED


def is_rejection(error: KvloopError) -> bool:
    """True if the request itself is at fault, so no worker would take it.

    An endpoint that one engine of a model does not have, the others have not either.
    """
    return isinstance(error, InvalidFieldError) or error.reason == _NO_ENDPOINT


def params_unused(error: KvloopError) -> bool:
    """True if transfer params that came with the call were certainly not used.

    An engine that rejects a request does so before it admits it, hence before
    its connector sees the params.
    """
    return engine_not_reached(error) or is_rejection(error)


def name_prompt(error: KvloopError, prompt_path: str) -> None:
    """Call the prompt by the caller's name for it where the engine blames its own.

    vLLM says `input_tokens` or `input_text` of what the caller sent as `messages`.
    """
    if error.metadata.get("field", "").startswith("input_"):
        error.metadata["field"] = prompt_path


def worker_is_down(error: KvloopError) -> bool:
    """True if the turn had better go elsewhere: worker or engine are away, or hang."""
    return engine_not_reached(error) or error.reason in _LOST


def is_leaving(error: KvloopError) -> bool:
    """True if the worker only finishes what it has, and is well.

    The turn goes elsewhere, as will all others.
    """
    return error.reason == _DRAINING


def is_down_for_all(error: KvloopError) -> bool:
    """True if one such failure is enough to keep other turns away.

    Where the engine's connection broke, it may have been this request's alone, with
    hundreds beside it that go on. An engine that is gone refuses the next one, and
    that leaves no doubt.
    """
    return worker_is_down(error) and error.reason != _ENGINE_LOST


def is_the_workers_fault(error: KvloopError) -> bool:
    """True if the worker failed where another might not have.

    A deadline that passed is nobody's fault: the caller may have been impatient.
    """
    return isinstance(error, InternalError)
