"""What holds for all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

import services.common.grpc_core  # noqa: F401  # first, as in the services' own processes

# How long an example takes says how busy the machine is. Hangs end by the test's timeout.
settings.register_profile("kvloop", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvloop")
