"""`kvloop chat` and `kvloop generate` against a router of scripted answers."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest

from kvloop.errors import InvalidFieldError, ModelNotFoundError
from kvloop.router.v1 import router_pb2
from tests.unit.client.fake_router import FakeRouter, chat_chunk, turn_result

Run = Callable[..., int]


@pytest.fixture
def serving(router: FakeRouter) -> FakeRouter:
    """A router that serves one model and answers "Hello"."""
    router.models = [router_pb2.Model(name="tiny", prefill_workers=1, decode_workers=1)]
    router.chunks = [chat_chunk("Hel"), chat_chunk("lo", finish_reason="stop")]
    router.result = turn_result(pulled=64, recomputed=36, turn=2, miss=None)
    return router


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _type(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Answer the chat's prompt with these lines, then Ctrl-D."""
    answers = iter(lines)

    def answer(prompt: str) -> str:
        try:
            return next(answers)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("sys.stdin", _Terminal())
    monkeypatch.setattr("builtins.input", answer)


def test_piped_lines_are_turns_of_one_conversation(
    serving: FakeRouter, kvloop: Run, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n"))
    assert kvloop("chat", "--max-tokens", "9", "--temperature", "0", "--no-reuse") == 0
    first, second, end = serving.requests
    assert [m.content for m in first.messages] == ["one"]
    assert [m.content for m in second.messages] == ["one", "Hello", "two"]
    assert first.conversation_id == second.conversation_id == end.conversation_id != ""
    assert (first.sampling.max_tokens, first.sampling.temperature) == (9, 0.0)
    assert first.disable_reuse
    written = capsys.readouterr()
    assert written.out == "Hello\nHello\n"
    assert written.err.count("turn 2: pulled 64 of 100 tokens from decode-0") == 2


def test_named_conversation_is_kept_for_another_time(
    serving: FakeRouter, kvloop: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n"))
    assert kvloop("chat", "--conversation", "trip", "--system", "Be brief.") == 0
    (turn,) = serving.requests
    assert turn.conversation_id == "trip"
    assert [m.role for m in turn.messages] == ["system", "user"]


def test_end_starts_a_new_conversation_and_quit_leaves(
    serving: FakeRouter, kvloop: Run, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    _type(monkeypatch, "one", "/help", "/end", "two", "/quit", "never said")
    assert kvloop("chat") == 0
    first, ended, second, left = serving.requests
    assert ended == router_pb2.EndConversationRequest(
        model="tiny", conversation_id=first.conversation_id
    )
    assert second.conversation_id not in ("", first.conversation_id)
    assert [m.content for m in second.messages] == ["two"]
    assert left.conversation_id == second.conversation_id
    assert "retained KV given up" in capsys.readouterr().err


def test_failed_turn_at_a_terminal_leaves_no_trace_in_history(
    serving: FakeRouter, kvloop: Run, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    serving.error = InvalidFieldError("too long", field="messages")
    _type(monkeypatch, "one", "two")
    assert kvloop("chat") == 0
    assert [m.content for m in serving.requests[1].messages] == ["two"]
    assert "kvloop: messages: too long" in capsys.readouterr().err


def test_failed_turn_in_a_script_ends_it(
    serving: FakeRouter, kvloop: Run, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    serving.error = InvalidFieldError("too long", field="messages")
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    assert kvloop("chat") == 2
    assert len(serving.requests) == 1
    assert "Traceback" not in capsys.readouterr().err


def test_generate_prints_the_answer_and_the_receipt_apart(
    serving: FakeRouter, kvloop: Run, capsys
) -> None:
    assert kvloop("generate", "Once", "--conversation", "c", "--max-tokens", "3") == 0
    (request,) = serving.requests
    assert (request.text, request.conversation_id, request.sampling.max_tokens) == ("Once", "c", 3)
    written = capsys.readouterr()
    assert written.out == "Hello\n"
    assert written.err.startswith("turn 2: pulled 64 of 100 tokens")


def test_generate_reads_a_pipe_and_token_ids(
    serving: FakeRouter, kvloop: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert kvloop("generate") == 0
    assert kvloop("generate", "--token-ids", "1, 2") == 0
    assert serving.requests[0].text == "from a pipe"
    assert list(serving.requests[1].token_ids.ids) == [1, 2]


def test_generate_without_a_prompt_or_with_wrong_ids_is_wrong_usage(
    serving: FakeRouter, kvloop: Run, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr("sys.stdin", _Terminal())
    assert kvloop("generate") == 2
    assert kvloop("generate", "--token-ids", "1;2") == 2
    assert "separated by commas" in capsys.readouterr().err


def test_with_several_models_one_has_to_be_chosen(serving: FakeRouter, kvloop: Run, capsys) -> None:
    serving.models = [router_pb2.Model(name="a"), router_pb2.Model(name="b")]
    assert kvloop("generate", "p") == 2
    assert "--model: a, b" in capsys.readouterr().err
    assert kvloop("generate", "p", "--model", "b") == 0
    assert serving.requests[0].model == "b"


def test_no_model_yet_says_why(router: FakeRouter, kvloop: Run, capsys) -> None:
    assert kvloop("generate", "p") == 2
    assert "no prefill and decode worker are up" in capsys.readouterr().err


def test_error_of_the_router_is_told_in_words(serving: FakeRouter, kvloop: Run, capsys) -> None:
    serving.error = ModelNotFoundError("no worker serves 'x'")
    assert kvloop("generate", "p", "--model", "x") == 2
    assert capsys.readouterr().err == "kvloop: no worker serves 'x'\n"


def test_unreachable_router_has_its_own_exit_status(kvloop: Run, capsys) -> None:
    assert kvloop("generate", "p", "--router", "127.0.0.1:1") == 3
    written = capsys.readouterr().err
    assert "cannot reach the service" in written
    assert "kvloop up" in written
