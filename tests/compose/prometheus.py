"""What Prometheus has seen of a stack."""

from __future__ import annotations

from collections import Counter
from typing import Any

import aiohttp

from tests.compose.stack import Stack


async def get(stack: Stack, path: str, **parameters: str) -> Any:
    """The data of a reply of Prometheus' API."""
    url = f"http://127.0.0.1:{stack.prometheus_port}/api/v1/{path}"
    async with aiohttp.ClientSession() as session, session.get(url, params=parameters) as reply:
        body = await reply.json()
    assert body["status"] == "success", body
    return body["data"]


async def query(stack: Stack, expression: str) -> list[tuple[dict[str, str], float]]:
    """Labels and value of each series now."""
    found = await get(stack, "query", query=expression)
    return [(each["metric"], float(each["value"][1])) for each in found["result"]]


async def targets_up(stack: Stack) -> Counter[str]:
    """Number of targets that answer, by job."""
    found = await get(stack, "targets", state="active")
    return Counter(
        target["labels"]["job"] for target in found["activeTargets"] if target["health"] == "up"
    )
