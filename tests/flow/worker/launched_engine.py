"""A program in the place of vLLM's API server, as the sidecar starts it.

Takes vLLM's flags, serves the fake HTTP surface, and reports over the event
socket that its environment names. With `--broken` it ends before that; with
`--hang` it never gets there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.unit.worker.fake_events_client import connect
from tests.unit.worker.fake_vllm import fake_vllm


def main() -> int:
    """Serve until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--kv-transfer-config", type=json.loads, required=True)
    parser.add_argument("--hang", action="store_true")
    parser.add_argument("--broken", action="store_true")
    known, _ = parser.parse_known_args()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    sys.stderr.write(f"pids {os.getpid()} {child.pid}\n")
    sys.stderr.write("INFO Starting to load model tiny...\n")
    if known.broken:
        sys.stderr.write("ValueError: broken weights\n")
        return 4
    if known.hang:
        signal.pause()
    asyncio.run(_serve(known.port, known.kv_transfer_config["kv_role"]))
    return 0


async def _serve(port: int, kv_role: str) -> None:
    socket = Path(os.environ["KVLOOP_EVENTS_SOCKET"])
    async with fake_vllm(port), connect(socket, kv_role=kv_role):
        await asyncio.Event().wait()


if __name__ == "__main__":
    sys.exit(main())
