"""A client's DELETE ends a conversation and frees what decode retains for it."""

from __future__ import annotations

from pathlib import Path

import openai

from tests.flow.gateway.fleet import PREAMBLE, Fleet, fleet
from tests.flow.sim.engines import MODEL

NAMED = {"x-conversation-id": "over/and out"}


async def _delete(found: Fleet, path: str) -> tuple[int, dict[str, object]]:
    async with found.session.delete(f"{found.url}/v1/conversations/{path}") as reply:
        return reply.status, await reply.json()


async def _retained(found: Fleet) -> Fleet:
    answer = await found.chat([{"role": "user", "content": PREAMBLE}], NAMED)
    assert answer.status == 200
    await found.decode.until(lambda state: len(state["pins"]) == 1)
    return found


async def test_a_delete_frees_the_conversations_blocks(tmp_path: Path) -> None:
    async with fleet(tmp_path) as found:
        await _retained(found)

        status, body = await _delete(found, "over%2Fand%20out")

        assert (status, body["deleted"], body["id"]) == (200, True, "over/and out")
        await found.decode.until(lambda state: state["pins"] == [])


async def test_a_delete_of_another_model_or_of_nothing_is_no_error(tmp_path: Path) -> None:
    async with fleet(tmp_path) as found:
        await _retained(found)

        assert (await _delete(found, "over%2Fand%20out?model=other"))[1]["deleted"] is False
        assert (await _delete(found, "never-heard-of"))[1]["deleted"] is False
        assert (await _delete(found, f"over%2Fand%20out?model={MODEL}"))[1]["deleted"] is True


async def test_the_openai_sdk_deletes_conversations(tmp_path: Path) -> None:
    async with fleet(tmp_path) as found:
        await _retained(found)
        async with openai.AsyncOpenAI(base_url=f"{found.url}/v1", api_key="any") as client:
            gone = await client.conversations.delete("over/and out")

        assert gone.deleted is True
        await found.decode.until(lambda state: state["pins"] == [])


async def test_an_id_that_is_too_long_is_refused(tmp_path: Path) -> None:
    async with fleet(tmp_path) as found:
        status, body = await _delete(found, "x" * 257)

        assert status == 400
        assert "conversation_id" in str(body["error"])
