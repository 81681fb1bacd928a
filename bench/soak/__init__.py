"""kvloop under load and under attack, as real processes with simulated engines."""

import os

# Read when gRPC is imported. No child process here uses the parent's channels, and
# each one that is started while calls are under way would be complained about.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
