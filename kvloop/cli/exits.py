"""How errors end the command: in words, and as an exit status."""

from __future__ import annotations

from kvloop.errors import (
    DeadlineError,
    InvalidFieldError,
    KvloopError,
    NotFoundError,
    UnavailableError,
)
from kvloop.stack import ProcessDiedError, ProcessNotReadyError

FAILED = 1
USAGE = 2
UNREACHABLE = 3
INTERRUPTED = 130


def exit_status(error: KvloopError) -> int:
    """The exit status that stands for an error; `kvloop --help` lists them."""
    if isinstance(error, InvalidFieldError | NotFoundError):
        return USAGE
    if isinstance(error, UnavailableError | DeadlineError):
        return UNREACHABLE
    return FAILED


def explain(error: KvloopError) -> str:
    """What happened, in words."""
    if isinstance(error, ProcessDiedError | ProcessNotReadyError):
        shown = "\n".join(f"  {line}" for line in error.last_lines) or "  (nothing)"
        return f"kvloop: {error}; its logs are in {error.log.parent} and end with\n{shown}"
    if isinstance(error, InvalidFieldError) and error.field and error.field not in error.message:
        return f"kvloop: {error.field}: {error.message}"
    if isinstance(error, UnavailableError) and error.reason == UnavailableError.default_reason:
        return f"kvloop: cannot reach the service: {error.message}\nIs it running? `kvloop up`."
    return f"kvloop: {error.message}"
