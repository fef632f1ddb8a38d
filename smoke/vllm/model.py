"""Qwen3-style models as folders with a config.json, and weights by name: for vLLM, and for transformers in float32."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

COMMON = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
SMALL = {**COMMON, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4, "vocab_size": 4096}
QWEN3_8B = {**COMMON, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "vocab_size": 151936}
SHARPNESS = 2.0  # of q_norm's weights: logits of attention with a standard deviation of 2, so that it matters


def write(folder: Path, config: Mapping[str, Any]) -> Path:
    """A model's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def weights(config: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight by its name in transformers, bf16, the same in each process: normal, over the root of fan-in."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q, kv = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    yield "model.embed_tokens.weight", _drawn("embed", (vocab, hidden), 1.0)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        for name, rows, columns in (
            ("self_attn.q_proj", q, hidden),
            ("self_attn.k_proj", kv, hidden),
            ("self_attn.v_proj", kv, hidden),
            ("self_attn.o_proj", hidden, q),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            yield f"{at}.{name}.weight", _drawn(f"{at}.{name}", (rows, columns), columns**-0.5)
        yield f"{at}.self_attn.q_norm.weight", torch.full((config["head_dim"],), SHARPNESS, dtype=torch.bfloat16)
        yield f"{at}.self_attn.k_norm.weight", torch.ones(config["head_dim"], dtype=torch.bfloat16)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}.{name}.weight", 1 + _drawn(f"{at}.{name}", (hidden,), 0.1)
    yield "model.norm.weight", torch.ones(hidden, dtype=torch.bfloat16)
    yield "lm_head.weight", _drawn("lm_head", (vocab, hidden), 2 * hidden**-0.5)


def _drawn(name: str, shape: tuple[int, ...], scale: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return (scale * torch.randn(shape, generator=generator)).to(torch.bfloat16)
