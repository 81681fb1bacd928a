"""Runs a whole kvloop stack on this machine: the ledger, a router, and workers.

    from kvloop.stack import Stack, StackSettings

    async with Stack(StackSettings(model="/models/qwen")) as stack:
        print(stack.router_address)

Used by `kvloop up`, by `kvloop demo` and by tests. Linux only, as vLLM is.
"""

from kvloop.stack.errors import ProcessDiedError, ProcessNotReadyError
from kvloop.stack.plan import EntryPoints
from kvloop.stack.settings import StackSettings, WorkerSettings, make_workers
from kvloop.stack.status import ProcessState, ProcessStatus
from kvloop.stack.supervisor import Stack

__all__ = [
    "EntryPoints",
    "ProcessDiedError",
    "ProcessNotReadyError",
    "ProcessState",
    "ProcessStatus",
    "Stack",
    "StackSettings",
    "WorkerSettings",
    "make_workers",
]
