"""What an engine's metrics say about its pulls, and how its cache is reset."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvloop.bench.transfers import HttpPrefillEngine, Transfers, parse_transfers
from kvloop.errors import UnavailableError

_METRICS = """\
# HELP vllm:nixl_xfer_time_seconds Histogram of transfer duration for NIXL KV Cache transfers.
# TYPE vllm:nixl_xfer_time_seconds histogram
vllm:nixl_xfer_time_seconds_bucket{engine="0",le="0.005",model_name="m"} 1.0
vllm:nixl_xfer_time_seconds_count{engine="0",model_name="m"} 3.0
vllm:nixl_xfer_time_seconds_sum{engine="0",model_name="m"} 0.5
vllm:nixl_xfer_time_seconds_count{engine="1",model_name="m"} 1.0
vllm:nixl_xfer_time_seconds_sum{engine="1",model_name="m"} 0.25
vllm:nixl_post_time_seconds_sum{engine="0",model_name="m"} 0.125
vllm:nixl_bytes_transferred_sum{engine="0",model_name="m"} 1.5e+09
vllm:nixl_bytes_transferred_created{engine="0",model_name="m"} 1.7e+09
vllm:nixl_num_descriptors_sum{engine="0",model_name="m"} 4096.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 77.0
"""


def test_sums_are_read_over_all_engines() -> None:
    assert parse_transfers(_METRICS) == Transfers(
        count=4, bytes=1.5e9, transfer_seconds=0.75, post_seconds=0.125, descriptors=4096.0
    )


def test_an_engine_without_pulls_has_zeros() -> None:
    nothing = parse_transfers("vllm:prompt_tokens_total 77.0\n")
    assert nothing == Transfers()
    assert nothing.bytes_per_second is None
    assert nothing.mean_seconds is None


def test_bandwidth_and_mean_time_come_from_the_difference_of_two_looks() -> None:
    before = Transfers(1, 100.0, 1.0, 0.5, 10.0)
    after = Transfers(3, 700.0, 4.0, 1.0, 30.0)
    pulled = after - before
    assert pulled == Transfers(2, 600.0, 3.0, 0.5, 20.0)
    assert pulled + before == after
    assert pulled.bytes_per_second == 200.0
    assert pulled.mean_seconds == 1.5


class _Engine(BaseHTTPRequestHandler):
    resets = 0
    dev_mode = True

    def do_GET(self) -> None:
        self._answer(200, _METRICS.encode())

    def do_POST(self) -> None:
        if self.path != "/reset_prefix_cache" or not type(self).dev_mode:
            self._answer(404, b"")
            return
        type(self).resets += 1
        self._answer(200, b"")

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def engine() -> Iterator[str]:
    _Engine.resets, _Engine.dev_mode = 0, True
    with ThreadingHTTPServer(("127.0.0.1", 0), _Engine) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


async def test_the_engine_is_asked_over_http(engine: str) -> None:
    prefill = HttpPrefillEngine(engine)
    await prefill.reset_prefix_cache()
    assert _Engine.resets == 1
    assert (await prefill.transfers()).count == 4


async def test_an_engine_that_offers_no_reset_is_told_how_to(engine: str) -> None:
    _Engine.dev_mode = False
    with pytest.raises(UnavailableError, match="VLLM_SERVER_DEV_MODE=1"):
        await HttpPrefillEngine(engine).reset_prefix_cache()


async def test_an_engine_that_is_away_is_unavailable() -> None:
    with pytest.raises(UnavailableError, match="cannot be reached"):
        await HttpPrefillEngine("http://127.0.0.1:9").transfers()
