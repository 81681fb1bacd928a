"""All checks, in the order in which their findings make sense."""

from __future__ import annotations

from kvloop.doctor.facts import Facts
from kvloop.doctor.findings import Finding, Severity
from kvloop.doctor.links import check_links
from kvloop.doctor.probing import check_probe
from kvloop.doctor.pulls import check_pulls
from kvloop.doctor.retention import check_clock, check_leases, check_retained, check_reuse
from kvloop.doctor.workers import (
    check_pairs,
    check_services,
    check_side_channels,
    check_versions,
    check_workers,
)

CHECKS = (
    check_services,
    check_workers,
    check_versions,
    check_pairs,
    check_side_channels,
    check_probe,
    check_pulls,
    check_links,
    check_leases,
    check_retained,
    check_reuse,
    check_clock,
)


def examine(facts: Facts) -> list[Finding]:
    """What the facts say: what is wrong first, then advice."""
    found = [finding for check in CHECKS for finding in check(facts)]
    return sorted(found, key=lambda finding: finding.severity is not Severity.WRONG)
