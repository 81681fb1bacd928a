"""Makes model folders: models.py KIND FOLDER TOKENIZER_FOLDER.

KIND is `tiny` (4 layers, real random weights), or the shape of a model without weights, for
vLLM's `--load-format dummy`: Qwen3-8B, -14B and -32B (q8, q14, q32), Qwen3-30B-A3B (a3b, experts),
DeepSeek-V2-Lite (v2lite, experts and latent attention).
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_COMMON: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
_SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 1536,
        "vocab_size": 4096,
    },
    "q8": {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "intermediate_size": 12288,
    },
    "q14": {
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "intermediate_size": 17408,
    },
    "q32": {
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "intermediate_size": 25600,
    },
    "a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.001,
    },
    "v2lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 64,
        "intermediate_size": 10944,
        "vocab_size": 102400,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_experts_per_tok": 6,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "topk_group": 1,
        "topk_method": "greedy",
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_theta": 10000,
        "max_position_embeddings": 163840,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
        },
    },
}
_VALUE_BYTES = 2
_WEIGHT_STD = 0.1
"""Wide enough that greedy output depends on the whole context: a wrong KV block shows."""


def model_config(kind: str) -> dict[str, Any]:
    """The config.json of a kind."""
    shape = _SHAPES[kind]
    return {**_COMMON, **shape, "max_window_layers": shape["num_hidden_layers"]}


def kv_bytes_per_token(config: Mapping[str, Any]) -> int:
    """Bytes of KV that one token leaves in all layers, in 16-bit formats.

    Latent attention keeps one vector for a layer, from which all heads get keys and values.
    """
    if latent := config.get("kv_lora_rank"):
        values = latent + config["qk_rope_head_dim"]
    else:
        values = 2 * config["num_key_value_heads"] * config["head_dim"]
    return int(config["num_hidden_layers"] * values * _VALUE_BYTES)


def make_model(kind: str, folder: Path, tokenizer: Path) -> None:
    """Write one model folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in tokenizer.glob("tokenizer*.json"):
        shutil.copy(file, folder)
    config = model_config(kind)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    if kind == "tiny":
        _write_weights(config, folder / "model.safetensors")


def _write_weights(config: dict[str, Any], path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"] * config["head_dim"]
    kv_heads = config["num_key_value_heads"] * config["head_dim"]

    def random(*size: int) -> Any:
        return (torch.randn(*size) * _WEIGHT_STD).to(torch.bfloat16)

    def ones(size: int) -> Any:
        return torch.ones(size, dtype=torch.bfloat16)

    weights = {
        "model.embed_tokens.weight": random(config["vocab_size"], hidden),
        "lm_head.weight": random(config["vocab_size"], hidden),
        "model.norm.weight": ones(hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        weights |= {
            f"{prefix}self_attn.q_proj.weight": random(heads, hidden),
            f"{prefix}self_attn.k_proj.weight": random(kv_heads, hidden),
            f"{prefix}self_attn.v_proj.weight": random(kv_heads, hidden),
            f"{prefix}self_attn.o_proj.weight": random(hidden, heads),
            f"{prefix}self_attn.q_norm.weight": ones(config["head_dim"]),
            f"{prefix}self_attn.k_norm.weight": ones(config["head_dim"]),
            f"{prefix}mlp.gate_proj.weight": random(inner, hidden),
            f"{prefix}mlp.up_proj.weight": random(inner, hidden),
            f"{prefix}mlp.down_proj.weight": random(hidden, inner),
            f"{prefix}input_layernorm.weight": ones(hidden),
            f"{prefix}post_attention_layernorm.weight": ones(hidden),
        }
    save_file(weights, path, metadata={"format": "pt"})


if __name__ == "__main__":
    make_model(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
