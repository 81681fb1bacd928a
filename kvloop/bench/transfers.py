"""What a prefill engine says about its pulls, and how its prefix cache is emptied."""

from __future__ import annotations

import asyncio
import re
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Protocol

from kvloop.errors import UnavailableError

_TIMEOUT_SECONDS = 10.0
_SAMPLE = re.compile(r"^(vllm:nixl_\w+?_(?:sum|count))(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Transfers:
    """Sums over an engine's finished pulls.

    Attributes:
        count: pulls, per rank.
        bytes: bytes moved.
        transfer_seconds: from posting to completion.
        post_seconds: part of that spent on posting.
        descriptors: pieces of memory that were moved.
    """

    count: int = 0
    bytes: float = 0.0
    transfer_seconds: float = 0.0
    post_seconds: float = 0.0
    descriptors: float = 0.0

    def __add__(self, other: Transfers) -> Transfers:
        return Transfers(
            count=self.count + other.count,
            bytes=self.bytes + other.bytes,
            transfer_seconds=self.transfer_seconds + other.transfer_seconds,
            post_seconds=self.post_seconds + other.post_seconds,
            descriptors=self.descriptors + other.descriptors,
        )

    def __sub__(self, other: Transfers) -> Transfers:
        return Transfers(
            count=self.count - other.count,
            bytes=self.bytes - other.bytes,
            transfer_seconds=self.transfer_seconds - other.transfer_seconds,
            post_seconds=self.post_seconds - other.post_seconds,
            descriptors=self.descriptors - other.descriptors,
        )

    @property
    def bytes_per_second(self) -> float | None:
        """Bandwidth over all of them; None if nothing was moved."""
        return self.bytes / self.transfer_seconds if self.transfer_seconds > 0 else None

    @property
    def mean_seconds(self) -> float | None:
        """Mean time of one pull; None without any."""
        return self.transfer_seconds / self.count if self.count else None


def parse_transfers(metrics: str) -> Transfers:
    """The sums in vLLM's metrics page; zeros if it has none.

    Args:
        metrics: Prometheus text format.
    """
    sums: dict[str, float] = {}
    for name, value in _SAMPLE.findall(metrics):
        sums[name] = sums.get(name, 0.0) + float(value)
    return Transfers(
        count=int(sums.get("vllm:nixl_xfer_time_seconds_count", 0)),
        bytes=sums.get("vllm:nixl_bytes_transferred_sum", 0.0),
        transfer_seconds=sums.get("vllm:nixl_xfer_time_seconds_sum", 0.0),
        post_seconds=sums.get("vllm:nixl_post_time_seconds_sum", 0.0),
        descriptors=sums.get("vllm:nixl_num_descriptors_sum", 0.0),
    )


class PrefillEngine(Protocol):
    """A prefill worker's vLLM server, beside the router's API."""

    async def reset_prefix_cache(self) -> None:
        """Forget all prefixes, so that the next turn finds the engine cold.

        vLLM does so only while no block is in use, and does not say whether it
        did: a turn's `cached_tokens` tells.

        Raises:
            UnavailableError: the engine cannot be reached or does not offer it.
        """
        ...

    async def transfers(self) -> Transfers:
        """Sums over its pulls since it started.

        Raises:
            UnavailableError: the engine cannot be reached.
        """
        ...


class HttpPrefillEngine:
    """Implements PrefillEngine over vLLM's HTTP server.

    Resetting needs VLLM_SERVER_DEV_MODE=1 in the engine's environment.

    Args:
        url: base URL, such as http://127.0.0.1:8100.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    async def reset_prefix_cache(self) -> None:
        """See PrefillEngine."""
        await asyncio.to_thread(self._call, "/reset_prefix_cache", b"")

    async def transfers(self) -> Transfers:
        """See PrefillEngine."""
        return parse_transfers(await asyncio.to_thread(self._call, "/metrics", None))

    def _call(self, path: str, body: bytes | None) -> str:
        request = urllib.request.Request(self._url + path, data=body)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            hint = (
                "; start the engine with VLLM_SERVER_DEV_MODE=1"
                if error.code == 404 and body is not None
                else ""
            )
            raise UnavailableError(f"{self._url}{path} answered {error.code}{hint}") from error
        except OSError as error:
            raise UnavailableError(f"{self._url}{path} cannot be reached: {error}") from error
