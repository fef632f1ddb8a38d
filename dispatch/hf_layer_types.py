"""Which kind of attention each layer has: as a config.json lists it, or as its model class derives it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from dispatch.hf_fields import Fields


class Kind(Enum):
    """What a layer keeps for each request: all KV, the last of it, or none."""

    FULL = "full"
    SLIDING = "sliding"
    NO_SOFTMAX = "no softmax"


_KINDS = {
    "full_attention": Kind.FULL,
    "attention": Kind.FULL,
    "sliding_attention": Kind.SLIDING,
    "linear_attention": Kind.NO_SOFTMAX,
    "mamba": Kind.NO_SOFTMAX,
    "mamba2": Kind.NO_SOFTMAX,
    "conv": Kind.NO_SOFTMAX,
    "recurrent": Kind.NO_SOFTMAX,
}
# Other families' ways to say which layers have attention: to take all would count layers that have none.
_OTHER_LAYOUTS = dict.fromkeys(
    (
        "attn_layer_indices",
        "attn_layer_period",
        "attn_type_list",
        "block_types",
        "hybrid_override_pattern",
        "layers_block_type",
    ),
    "which layers have attention is read from layer_types only",
)


def layer_kinds(fields: Fields, count: int) -> Sequence[Kind]:
    """The kind of each of `count` layers. Raises ModelError for kinds and layouts that are not served."""
    listed = fields.names("layer_types")
    if listed is None:
        fields.refuse(_OTHER_LAYOUTS)
        return _derived(fields, count)
    if len(listed) != count:
        raise fields.error("layer_types", f"has {len(listed)} entries for num_hidden_layers={count}")
    for kind in listed:
        if kind not in _KINDS:
            raise fields.error("layer_types", f"{kind[:40]!r} is not served; known are {', '.join(_KINDS)}")
    if "sliding_attention" in listed and fields.boolean("use_sliding_window") is not False:
        fields.require("sliding_window")
    return [_KINDS[kind] for kind in listed]


def _derived(fields: Fields, count: int) -> Sequence[Kind]:
    """Every Nth layer full and those between sliding or linear, or the first few full, or all alike."""
    linear_interval = fields.integer("full_attention_interval")
    sliding_pattern = fields.integer("sliding_window_pattern")
    first_sliding = fields.integer("max_window_layers", low=0) or 0
    if linear_interval is not None:
        return [Kind.NO_SOFTMAX if (i + 1) % linear_interval else Kind.FULL for i in range(count)]
    kinds = []
    for i in range(count):
        full = i < first_sliding or (sliding_pattern is not None and (i + 1) % sliding_pattern == 0)
        kinds.append(Kind.FULL if full else Kind.SLIDING)
    return kinds
