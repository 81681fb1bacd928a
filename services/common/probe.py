"""Says by its exit status how a gRPC server is: for container health checks.

    python -m services.common.probe HOST:PORT [--service NAME] [--timeout-seconds 2]

Without a service it asks whether the server takes calls; with one, such as
kvloop.router.v1.RouterService, whether that is ready. With $KVLOOP_TLS_CA_FILE and its
relatives it speaks TLS, as the command kvloop does.
0: it answers SERVING. 1: it does not, and why is on standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvloop import rpc
from kvloop.tls import TlsSource, tls_from_environment


async def obstacle(
    target: str, timeout_seconds: float, tls: TlsSource | None = None, service: str = ""
) -> str | None:
    """Why the server at host:port takes no calls, or the service is not ready; None if it is."""
    async with rpc.open_channel(target, tls) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(
                health_pb2.HealthCheckRequest(service=service),
                timeout=timeout_seconds,
                wait_for_ready=True,
            )
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return f"{target} has no service {service}"
            return f"{target} does not answer: {error.code().name}"
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return None
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return f"{service or target} is {status}"


def main(arguments: list[str] | None = None) -> int:
    """Probe once; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m services.common.probe", description=__doc__)
    parser.add_argument("target", metavar="HOST:PORT")
    parser.add_argument("--service", metavar="NAME", default="")
    parser.add_argument("--timeout-seconds", type=float, default=2.0)
    options = parser.parse_args(arguments)
    try:
        tls = tls_from_environment(os.environ)
    except (OSError, ValueError) as error:
        parser.error(f"TLS: {error}")
    found = asyncio.run(obstacle(options.target, options.timeout_seconds, tls, options.service))
    if found is not None:
        sys.stderr.write(f"{found}\n")
    return 0 if found is None else 1


if __name__ == "__main__":
    sys.exit(main())
