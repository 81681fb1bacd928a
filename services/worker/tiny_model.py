"""Makes a tiny chat model for machines that cannot download one.

    python -m services.worker.tiny_model DIR

The model has the shape of Qwen3 (5.2 M parameters, 21 MB) and random weights,
so what it says means nothing. That is no hindrance for kvloop: the spread of the
weights makes greedy output depend strongly on the whole context, so a single
wrong KV block shows as different tokens. It answers in whole words, whose text
encodes to the same tokens again, so that the next turn's prompt extends what the
decode engine holds, as it does with a trained model.

Weights come from a fixed seed. The tokenizer is trained on the language
reference that ships with Python, so token counts can differ a little between
Python versions. A complete model is left alone; an incomplete one is replaced.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 4096
MAX_POSITIONS = 16_384
_SEED = 0
_WEIGHT_STD = 0.15
_MARKER = "kvloop-tiny-model.json"
"""Written last; its presence with the current recipe says the model is whole."""
_RECIPE = {"recipe": 2, "vocab_size": VOCAB_SIZE, "seed": _SEED, "std": _WEIGHT_STD}

_END_OF_TEXT, _START, _END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_SPECIAL_TOKENS = [_END_OF_TEXT, _START, _END, "<think>", "</think>", "<tool_call>", "</tool_call>"]

_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 256,
    "initializer_range": _WEIGHT_STD,
    "intermediate_size": 768,
    "max_position_embeddings": MAX_POSITIONS,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": VOCAB_SIZE,
}

_CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role in ('system', 'developer') %}
{{- messages[0].content + '\\n\\n' }}
{%- endif %}
{{- 'You may call these functions:\\n' }}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{% endfor %}
{{- 'To call one, write <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role in ('system', 'developer') %}
{%- if not (tools and loop.first) %}
{{- '<|im_start|>system\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{%- if message.content %}{{- message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""
"""ChatML with tools and tool answers. Reasoning is rendered when the message
carries it, so the caller decides whether history keeps it."""

_WORD = re.compile(r" [a-z]{2,}")

Array = NDArray[np.float32]


def is_complete(directory: Path) -> bool:
    """True if the directory holds a whole model made by this recipe."""
    try:
        return bool(json.loads((directory / _MARKER).read_text()) == _RECIPE)
    except (OSError, ValueError):
        return False


def make(directory: Path) -> bool:
    """Make the model unless it is there already.

    Files are written beside the directory and moved into place whole, so an
    interrupted run leaves nothing that looks like a model.

    Returns:
        False if a complete model was there.

    Raises:
        FileExistsError: the directory holds something that is no tiny model.
    """
    if is_complete(directory):
        return False
    if directory.exists() and any(directory.iterdir()) and not (directory / _MARKER).exists():
        raise FileExistsError(f"{directory} is not empty and holds no tiny model")
    directory.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        words = _whole_words(_write_tokenizer(building))
        _write_weights(building, words)
        _write_json(building / _MARKER, _RECIPE)
        building.chmod(0o755)
        shutil.rmtree(directory, ignore_errors=True)
        os.replace(building, directory)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return True


def _write_tokenizer(directory: Path) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        _training_text(),
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=list(_SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": MAX_POSITIONS,
            "clean_up_tokenization_spaces": False,
            "eos_token": _END,
            "pad_token": _END_OF_TEXT,
            "chat_template": _CHAT_TEMPLATE,
        },
    )
    return tokenizer


def _whole_words(tokenizer: Tokenizer) -> list[int]:
    """Tokens that are a space and a word, and that their own text encodes to."""
    return [
        token
        for token in range(tokenizer.get_vocab_size())
        if _WORD.fullmatch(text := tokenizer.decode([token]))
        and tokenizer.encode(text).ids == [token]
    ]


def _training_text() -> Iterator[str]:
    for name in sorted(topics):
        yield topics[name]


def _write_weights(directory: Path, words: list[int]) -> None:
    ids = {token: index for index, token in enumerate(_SPECIAL_TOKENS)}
    ends = {"bos_token_id": None, "eos_token_id": ids[_END], "pad_token_id": ids[_END_OF_TEXT]}
    _write_json(directory / "config.json", {**_CONFIG, **ends})
    _write_json(directory / "generation_config.json", ends)
    weights = directory / "model.safetensors"
    save_file(_weights(words), weights, metadata={"format": "pt"})
    weights.chmod(0o644)


def _weights(words: list[int]) -> dict[str, Array]:
    """Every tensor of the model, in the order in which they are drawn.

    Args:
        words: tokens that greedy output consists of. All others have logit 0, far
            below the best of these.
    """
    generator = np.random.default_rng(_SEED)
    hidden, inner, head = _CONFIG["hidden_size"], _CONFIG["intermediate_size"], _CONFIG["head_dim"]
    queries = _CONFIG["num_attention_heads"] * head
    keys = _CONFIG["num_key_value_heads"] * head

    def normal(*shape: int) -> Array:
        return generator.standard_normal(shape, dtype=np.float32) * np.float32(_WEIGHT_STD)

    def ones(size: int) -> Array:
        return np.ones(size, dtype=np.float32)

    tensors = {"model.embed_tokens.weight": normal(VOCAB_SIZE, hidden)}
    for index in range(_CONFIG["num_hidden_layers"]):
        layer = {
            "input_layernorm": ones(hidden),
            "self_attn.q_proj": normal(queries, hidden),
            "self_attn.k_proj": normal(keys, hidden),
            "self_attn.v_proj": normal(keys, hidden),
            "self_attn.o_proj": normal(hidden, queries),
            "self_attn.q_norm": ones(head),
            "self_attn.k_norm": ones(head),
            "post_attention_layernorm": ones(hidden),
            "mlp.gate_proj": normal(inner, hidden),
            "mlp.up_proj": normal(inner, hidden),
            "mlp.down_proj": normal(hidden, inner),
        }
        tensors |= {f"model.layers.{index}.{name}.weight": value for name, value in layer.items()}
    tensors["model.norm.weight"] = ones(hidden)
    head_weight = normal(VOCAB_SIZE, hidden)
    silent = np.ones(VOCAB_SIZE, dtype=bool)
    silent[words] = False
    head_weight[silent] = 0.0
    tensors["lm_head.weight"] = head_weight
    return tensors


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def main(arguments: list[str]) -> int:
    """Run as a command; the exit status is 2 on wrong usage."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        sys.stderr.write("usage: python -m services.worker.tiny_model DIR\n")
        return 2
    directory = Path(arguments[0])
    try:
        made = make(directory)
    except OSError as error:
        sys.stderr.write(f"cannot make the tiny model: {error}\n")
        return 1
    sys.stdout.write(f"{'made' if made else 'found'} the tiny model in {directory}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
