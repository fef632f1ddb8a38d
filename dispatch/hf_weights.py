"""What a model's weights weigh, from its config.json."""

from __future__ import annotations

from collections.abc import Sequence

from dispatch.errors import ModelError
from dispatch.hf_dense import read_dense
from dispatch.hf_fields import Fields
from dispatch.spec import DTYPE_BYTES, AttentionSpec

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts")
_SHARED_SIZE = ("shared_expert_intermediate_size", "shared_intermediate_size")
_UNGATED = ("apertus", "arcee", "gpt_neox", "jais2", "nemotron", "phi", "starcoder2")
_TIED = ("cohere", "gemma", "smollm3", "starcoder2")  # where the config is silent; what these types begin with

_QUANTIZED = {"quantization_config": "weights are not stored in the activation dtype"}
_OTHER_LAYOUTS = dict.fromkeys(
    ("expert_layer_period", "interleave_moe_layer_step", "mlp_layer_types", "mlp_only_layers", "num_dense_layers"),
    "which layers have experts is read from first_k_dense_replace and decoder_sparse_step only",
)


def weight_bytes(fields: Fields, groups: Sequence[AttentionSpec], tp: int) -> int:
    """Bytes of the decoder's weights on one of `tp` ranks, in the activation dtype. `groups`: what it runs there.

    The shapes are those in transformers' modeling_llama.py, modeling_starcoder2.py (an MLP without a gate),
    modeling_mixtral.py, modeling_qwen2_moe.py and modeling_glm4_moe.py; with h for hidden_size, elements are

        embeddings   vocab_size x h, twice unless tie_word_embeddings
        attention    h x (q heads + KV heads) x (head_dim_qk + head_dim_vo), each layer
        MLP          h x intermediate_size x 3 (gate, up, down), or x 2
        experts      in its place h x moe_intermediate_size x 3 for each routed and each shared one, and the router's
                     h x experts

    and every rank has its share of all but the router. Left out are norms and biases (below 0.1% of a model of
    billions), image towers, and layers that only draft. Raises ModelError where a field is missing or malformed, where
    weights are quantized, and for layers whose weights are not among these.
    """
    fields.refuse(_QUANTIZED)
    fields.require("hidden_size", "vocab_size")
    hidden = fields.integer("hidden_size") or 0
    count = fields.integer("num_hidden_layers") or 0
    if sum(group.num_layers for group in groups) != count:
        raise ModelError(f"{fields.source}: layers without softmax attention: their weights are not known")
    elements = _share(fields.integer("vocab_size") or 0, tp) * hidden * (1 if _tied(fields) else 2)
    for group in groups:
        heads = group.num_qo_heads + group.num_kv_heads
        elements += group.num_layers * hidden * heads * (group.head_dim_qk + group.head_dim_vo)
    return (elements + _mlp_elements(fields, hidden, count, tp)) * DTYPE_BYTES[groups[0].dtype]


def _mlp_elements(fields: Fields, hidden: int, count: int, tp: int) -> int:
    products = 2 if fields.text("model_type") in _UNGATED else 3
    experts = _first(fields, _EXPERTS)
    if not experts:
        return count * products * hidden * _share(read_dense(fields).intermediate_size, tp)
    fields.refuse(_OTHER_LAYOUTS)
    fields.require("intermediate_size")
    dense = fields.integer("intermediate_size") or 0
    expert = fields.integer("moe_intermediate_size") or dense
    shared = _first(fields, _SHARED_SIZE) or _first(fields, _SHARED_EXPERTS) * expert
    first = fields.integer("first_k_dense_replace", low=0) or 0
    step = fields.integer("decoder_sparse_step") or 1
    sparse = sum(i >= first and (i + 1) % step == 0 for i in range(count))
    layer = products * hidden * (experts * _share(expert, tp) + _share(shared, tp)) + hidden * experts
    return sparse * layer + (count - sparse) * products * hidden * _share(dense, tp)


def _tied(fields: Fields) -> bool:
    tied = fields.boolean("tie_word_embeddings")
    return (fields.text("model_type") or "").startswith(_TIED) if tied is None else tied


def _first(fields: Fields, names: Sequence[str]) -> int:
    """The first of these fields that is set and above 0; 0 where none is."""
    return next((value for name in names if (value := fields.integer(name, low=0))), 0)


def _share(size: int, tp: int) -> int:
    return -(-size // tp)  # what does not divide is padded
