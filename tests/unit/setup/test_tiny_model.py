"""The tiny model is whole, the same every time, and never overwrites anything."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from jinja2 import Environment
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from services.worker import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A freshly made model."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    assert tiny_model.make(directory)
    return directory


def _read(model: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((model / name).read_text())
    return content


def _render(model: Path, messages: list[dict[str, Any]], **variables: Any) -> str:
    template = _read(model, "tokenizer_config.json")["chat_template"]
    environment = Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = json.dumps  # as transformers does; jinja's is for HTML
    return environment.from_string(template).render(messages=messages, **variables)


def test_weights_have_the_shape_that_the_config_promises(model: Path) -> None:
    config = _read(model, "config.json")
    tensors = load_file(model / "model.safetensors")
    assert sum(tensor.size for tensor in tensors.values()) == 5_245_696
    assert tensors["lm_head.weight"].shape == (config["vocab_size"], config["hidden_size"])
    assert tensors["model.embed_tokens.weight"].std() == pytest.approx(0.15, rel=0.01)
    layers = {name.split(".")[2] for name in tensors if name.startswith("model.layers.")}
    assert len(layers) == config["num_hidden_layers"]


def test_tokenizer_gives_text_back_and_knows_the_ends(model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    config = _read(model, "config.json")
    assert tokenizer.get_vocab_size() == config["vocab_size"] == tiny_model.VOCAB_SIZE
    text = "Tides, wörter, 漢字 and 👍\n\n  indented"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("<|im_end|>").ids == [config["eos_token_id"]]


def test_greedy_answers_are_words_whose_text_encodes_to_the_same_tokens(model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    head = load_file(model / "model.safetensors")["lm_head.weight"]
    # All other tokens have logit 0, which the best of so many normal ones exceeds.
    spoken = [token for token, row in enumerate(head) if row.any()]
    assert len(spoken) > 500
    answer = random.Random(1).choices(spoken, k=2000)
    assert tokenizer.encode(tokenizer.decode(answer)).ids == answer


def test_template_extends_the_history_and_never_changes_it(model: Path) -> None:
    first = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    prompt = _render(model, first, add_generation_prompt=True)
    answered = [*first, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "?"}]
    following = _render(model, answered, add_generation_prompt=True)
    assert following.startswith(prompt + "Hello<|im_end|>\n")


def test_template_renders_tools_tool_calls_and_reasoning(model: Path) -> None:
    tools = [{"type": "function", "function": {"name": "clock"}}]
    text = _render(
        model,
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Time?"},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "ask",
                "tool_calls": [{"id": "a", "function": {"name": "clock", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "a", "content": "12:00"},
        ],
        tools=tools,
    )
    assert text.count("Be brief.") == 1
    assert '{"type": "function", "function": {"name": "clock"}}' in text
    assert "<think>\nask\n</think>" in text
    assert '<tool_call>{"name": "clock", "arguments": "{}"}</tool_call>' in text
    assert "<|im_start|>tool\n12:00<|im_end|>" in text


def test_two_runs_make_the_same_files(model: Path, tmp_path: Path) -> None:
    tiny_model.make(tmp_path / "again")
    for path in model.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes(), path.name


def test_complete_model_is_left_alone(model: Path) -> None:
    before = (model / "config.json").stat().st_mtime_ns
    assert not tiny_model.make(model)
    assert (model / "config.json").stat().st_mtime_ns == before


def test_model_of_another_recipe_is_replaced(tmp_path: Path) -> None:
    directory = tmp_path / "tiny"
    directory.mkdir()
    (directory / "kvloop-tiny-model.json").write_text('{"recipe": 0}')
    assert tiny_model.make(directory)
    assert tiny_model.is_complete(directory)


def test_folder_of_someone_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(FileExistsError, match="holds no tiny model"):
        tiny_model.make(tmp_path)
    assert (tmp_path / "letter.txt").read_text() == "dear"


def test_failure_leaves_nothing_that_looks_like_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(tiny_model, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        tiny_model.make(tmp_path / "tiny")
    assert list(tmp_path.iterdir()) == []


def test_command_says_what_it_did(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny_model.main([str(model)]) == 0
    assert "found the tiny model" in capsys.readouterr().out
    assert tiny_model.main([]) == 2
    assert tiny_model.main(["--help"]) == 2
