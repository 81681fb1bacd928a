"""Runs a command that ends when the process that started it does.

    python -I -S tether.py PARENT_PID COMMAND [ARGUMENT...]

Run as a file, so that it loads nothing of kvloop and costs a few milliseconds.
The kernel keeps the request over exec. Without it, a supervisor killed by
SIGKILL would leave a stack of engines behind.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Become the command."""
    parent, command = int(arguments[0]), arguments[1:]
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM)) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        sys.exit(1)  # it had ended before the kernel was asked
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
