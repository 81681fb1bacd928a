"""A program that behaves like an engine with worker processes.

It starts a child in its own process group and a grandchild in a session of its
own, as engines do or might do, and prints all process ids as JSON.

    python fake_engine_program.py [--ignore-term] [--exit STATUS]
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

_SLEEP = "import time; time.sleep(300)"
_IGNORE = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + _SLEEP


def main(arguments: list[str]) -> int:
    """Start the children and wait."""
    ignore = "--ignore-term" in arguments
    if ignore:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    code = _IGNORE if ignore else _SLEEP
    inside = subprocess.Popen([sys.executable, "-c", code])
    outside = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    sys.stdout.write(json.dumps({"pids": [os.getpid(), inside.pid, outside.pid]}) + "\n")
    sys.stdout.write("KVLOOP_TEST=" + os.environ.get("KVLOOP_TEST", "") + "\n")
    sys.stdout.write("loading 10%\rloading 20%\r")
    sys.stdout.flush()
    if "--exit" in arguments:
        return int(arguments[arguments.index("--exit") + 1])
    time.sleep(300)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
