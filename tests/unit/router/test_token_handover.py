"""Decode takes long chats as token ids where its vLLM can."""

from __future__ import annotations

import pytest

from kvloop.common.v1 import common_pb2
from services.router.openai_fields import Options
from services.router.request import TurnRequest
from services.router.token_handover import takes_token_ids
from tests.flow.router.fakes import make_worker

DECODE = common_pb2.WORKER_ROLE_DECODE


def _turn(
    size: int = 5000, api: common_pb2.Api.ValueType = common_pb2.API_CHAT_COMPLETIONS
) -> TurnRequest:
    return TurnRequest(
        api=api, model="m", body_json=b"x" * size, prompt_path="messages", options=Options()
    )


@pytest.mark.parametrize(
    ("version", "takes"),
    [
        *(("0.32.0", True), ("0.33.1rc2", True), ("1.0", True), ("0.32", True)),
        *(("0.31.9", False), ("0.25.1", False), ("", False), ("unknown", False)),
    ],
)
def test_vllm_takes_token_ids_since_0_32(version: str, takes: bool) -> None:
    assert takes_token_ids(_turn(), make_worker("d", DECODE, vllm_version=version)) is takes


def test_short_chats_other_endpoints_and_unknown_decode_workers_do_without() -> None:
    worker = make_worker("d", DECODE, vllm_version="0.33.0")
    assert not takes_token_ids(_turn(size=1000), worker)
    assert not takes_token_ids(_turn(api=common_pb2.API_COMPLETIONS), worker)
    assert not takes_token_ids(_turn(api=common_pb2.API_RESPONSES), worker)
    assert not takes_token_ids(_turn(), None)
