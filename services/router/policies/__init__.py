"""The policies by name. See services/router/policy.py for what they share."""

from __future__ import annotations

from enum import StrEnum

from services.router.policies import (
    expected_ttft,
    least_loaded,
    power_of_two,
    prefix_affinity,
)
from services.router.policy import Policy


class PolicyName(StrEnum):
    """Names of the policies."""

    LEAST_LOADED = "least_loaded"
    """The fewest turns in flight."""
    POWER_OF_TWO = "power_of_two"
    """The less busy of two that are drawn."""
    PREFIX_AFFINITY = "prefix_affinity"
    """The same worker for the same beginning, within bounds of load."""
    EXPECTED_TTFT = "expected_ttft"
    """The least expected time to first token."""


POLICIES: dict[PolicyName, Policy] = {
    PolicyName.LEAST_LOADED: least_loaded.POLICY,
    PolicyName.POWER_OF_TWO: power_of_two.POLICY,
    PolicyName.PREFIX_AFFINITY: prefix_affinity.POLICY,
    PolicyName.EXPECTED_TTFT: expected_ttft.POLICY,
}
