"""What a long prompt costs on its way, step by step and hop by hop; see docs/benchmarks.md."""

from services.common import grpc_core  # noqa: F401, as in the services' own processes
