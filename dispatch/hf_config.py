"""The attention of each layer, as a model's config.json in Hugging Face's form describes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dispatch.errors import ModelError
from dispatch.hf_fields import Fields
from dispatch.hf_layer_types import Kind, layer_kinds

MAX_LAYERS = 10_000  # ten times any model's, and a mistyped count does not fill the memory
_REQUIRED = ("num_hidden_layers", "num_attention_heads", "max_position_embeddings")
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}

# What the model's class assumes where its published config.json is silent.
_GEMMA3 = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}
_CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "cohere2": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "gemma2": {
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
    },
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gpt_oss": {"head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2},
    "qwen3": {"head_dim": 128},
}
_QWEN_DEFAULTS = {"use_sliding_window": False, "max_window_layers": 28}

_NOT_SERVED = {
    "kv_lora_rank": "multi-head latent attention (MLA) caches one compressed row a token, not K and V heads",
    "attention_chunk_size": "chunked attention needs a mask that no backend here has",
    "dual_chunk_attention_config": "dual chunk attention is several attentions merged, not one kernel",
    "alibi": "a bias that grows with distance is added to the logits, which no backend here does",
    "is_encoder_decoder": "cross-attention does not grow with the decoded tokens",
    "block_configs": "layers with heads of their own are not read",
    "global_head_dim": "layers with a head size of their own are not read",
    "hybrid_layer_pattern": "layers with heads of their own are not read",
}
_OTHER_KV_HEADS = dict.fromkeys(("num_kv_heads", "multi_query"), "only num_key_value_heads is read")
_ENCODERS = ("bert", "clip", "electra", "siglip")
# Fields that stand beside text_config in multimodal configs, and hold for it where it is silent.
_SHARED = (
    "architectures",
    "dtype",
    "is_encoder_decoder",
    "model_type",
    "quantization_config",
    "tie_word_embeddings",
    "torch_dtype",
)


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """One layer's attention; head counts are the whole model's, before they are split over ranks.

    `sliding_window` counts tokens, the current one included.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    sm_scale: float
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    has_sinks: bool = False


def decoder_fields(source: str, config: Mapping[str, Any]) -> Fields:
    """The decoder's fields: those of text_config if there is one, over the defaults of the model's class.

    Raises ModelError where fields are missing, and for attention of a kind that is not served.
    """
    inner = config.get("text_config")
    if inner is not None:
        if not isinstance(inner, dict):
            raise Fields(source, config).error("text_config", "must be an object")
        source = f"{source}, text_config"
        config = {name: config[name] for name in _SHARED if name in config} | inner
    model_type = Fields(source, config).text("model_type") or ""
    defaults = _QWEN_DEFAULTS if model_type.startswith("qwen") else {}
    fields = Fields(source, {**defaults, **_CLASS_DEFAULTS.get(model_type, {}), **config})
    fields.refuse(_NOT_SERVED)
    if any(name in model_type for name in _ENCODERS):
        raise fields.error("model_type", "not served: an encoder keeps no KV cache")
    if any(name.endswith("ForMaskedLM") for name in fields.names("architectures") or ()):
        raise fields.error("architectures", "not served: an encoder keeps no KV cache")
    no_head_dim = fields.values.get("head_dim") is None
    fields.require(*_REQUIRED, *(("hidden_size",) if no_head_dim else ()))
    return fields


def read_dtype(fields: Fields) -> str:
    """The activation dtype; bf16 where the config is silent, which is what engines then run."""
    name = "dtype" if fields.values.get("dtype") is not None else "torch_dtype"
    text = fields.text(name)
    if text is None:
        return "bf16"
    dtype = _DTYPES.get(text.removeprefix("torch."))
    if dtype is None:
        raise fields.error(name, f"must be one of {', '.join(_DTYPES)}")
    return dtype


def read_layers(fields: Fields) -> tuple[LayerAttention, ...]:
    """The attention layers in their order; layers without softmax attention are left out.

    Raises ModelError where a field is malformed or not served, or where no layer is left.
    """
    count = fields.integer("num_hidden_layers", high=MAX_LAYERS) or 0
    num_qo_heads = fields.integer("num_attention_heads") or 0
    if fields.values.get("num_key_value_heads") is None:
        fields.refuse(_OTHER_KV_HEADS)
    num_kv_heads = fields.integer("num_key_value_heads") or num_qo_heads
    if num_qo_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"must divide num_attention_heads={num_qo_heads}")
    head_dim = _head_dim(fields, num_qo_heads)
    full = LayerAttention(
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim_qk=head_dim,
        head_dim_vo=fields.integer("v_head_dim") or head_dim,
        sm_scale=_sm_scale(fields, head_dim),
        logits_soft_cap=fields.positive("attn_logit_softcapping"),
        has_sinks=fields.text("model_type") == "gpt_oss",
    )
    window = None if fields.boolean("use_sliding_window") is False else fields.integer("sliding_window")
    by_kind = {Kind.FULL: full, Kind.SLIDING: replace(full, sliding_window=window)}
    layers = tuple(by_kind[kind] for kind in layer_kinds(fields, count) if kind is not Kind.NO_SOFTMAX)
    if not layers:
        raise ModelError(f"{fields.source}: no layer of {count} has softmax attention: nothing to serve")
    return layers


def _head_dim(fields: Fields, num_qo_heads: int) -> int:
    hidden_size = fields.integer("hidden_size") or 0
    head_dim = fields.integer("head_dim")
    if head_dim is not None:
        return head_dim
    if hidden_size % num_qo_heads:
        raise fields.error("hidden_size", f"must be head_dim x num_attention_heads={num_qo_heads}, or give head_dim")
    return hidden_size // num_qo_heads


def _sm_scale(fields: Fields, head_dim: int) -> float:
    """Gemma divides by the root of a number of its own, Granite multiplies by one."""
    scalar = fields.positive("query_pre_attn_scalar")
    multiplier = fields.positive("attention_multiplier")
    if scalar is not None:
        return 1.0 / math.sqrt(scalar)
    return 1.0 / math.sqrt(head_dim) if multiplier is None else multiplier
