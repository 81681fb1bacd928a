"""A handle that leads anywhere else than to its registered worker is never shown."""

from __future__ import annotations

import json

from structlog.testing import capture_logs

from tests.flow.router.stack import Stack, running

SIDE_CHANNEL = {"side_channel_host": "fd00::1", "side_channel_port": 5700}


def _params(stack: Stack, host: str) -> bytes:
    return json.dumps(
        {
            "remote_engine_id": stack["d0"].worker.engine.engine_id,
            "remote_host": host,
            "remote_port": 5700,
        }
    ).encode()


async def test_a_handle_of_a_registered_side_channel_is_shown() -> None:
    async with running(traits={"d0": SIDE_CHANNEL}) as stack:
        stack.give_handle("c", "d0", params := _params(stack, "fd00::1"))
        answer = await stack.chat("c")
        assert answer.receipt.handle_hit
        assert stack["p0"].prefills[-1].transfer_params_json == params


async def test_a_handle_of_another_address_is_a_loud_miss_and_not_given_back() -> None:
    async with running(traits={"d0": SIDE_CHANNEL}) as stack:
        handle_id = stack.give_handle("c", "d0", _params(stack, "10.6.6.6"))
        with capture_logs() as logged:
            answer = await stack.chat("c")
        assert answer.miss == "INCOMPATIBLE"
        assert answer.chunks
        assert stack["p0"].prefills[-1].transfer_params_json == b""
        assert stack.count("fallbacks_total", cause="handle_leads_elsewhere") == 1
        assert handle_id not in stack.ledger.returned
        loud = [entry for entry in logged if entry["event"] == "handle_leads_elsewhere"]
        assert [(entry["log_level"], entry["part"]) for entry in loud] == [("error", "remote_host")]
        assert "10.6.6.6" not in str(logged)
