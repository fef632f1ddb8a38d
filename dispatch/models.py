"""From a model's name or config.json to the attention layer groups that a rank of it runs."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dispatch.errors import ModelError, SpecError
from dispatch.hf_config import LayerAttention, decoder_fields, read_dtype, read_layers
from dispatch.hf_fields import Fields
from dispatch.plainjson import load
from dispatch.readfile import read_file
from dispatch.spec import AttentionSpec

_PRESETS = Path(__file__).with_name("presets")


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder's attention layers, before they are split over ranks.

    `dtype` is the activations': "bf16", "fp16" or "fp32". `max_position_embeddings` counts tokens.
    """

    name: str
    dtype: str
    max_position_embeddings: int
    layers: tuple[LayerAttention, ...]

    def layer_groups(self, tp: int, page_size: int, kv_dtype: str | None = None) -> tuple[AttentionSpec, ...]:
        """One spec for each group of equal layers, as one of `tp` ranks runs them; by first appearance.

        `page_size` counts tokens. `kv_dtype` None or "auto" is the activation dtype, "fp8" is fp8_e4m3, as in engines.
        With more ranks than KV heads, each rank has one, replicated. Raises ModelError where the heads do not divide,
        or where AttentionSpec refuses a value.
        """
        if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1:
            raise ModelError(f"{self.name}: tp={tp!r}: must be a whole number above 0")
        try:
            return tuple(
                AttentionSpec(
                    num_qo_heads=self._split("query heads", layer.num_qo_heads, tp),
                    num_kv_heads=self._split_kv_heads(layer.num_kv_heads, tp),
                    head_dim_qk=layer.head_dim_qk,
                    head_dim_vo=layer.head_dim_vo,
                    page_size=page_size,
                    num_layers=num_layers,
                    dtype=self.dtype,
                    kv_dtype=self._kv_dtype(kv_dtype),
                    sm_scale=layer.sm_scale,
                    sliding_window=layer.sliding_window,
                    logits_soft_cap=layer.logits_soft_cap,
                    has_sinks=layer.has_sinks,
                )
                for layer, num_layers in Counter(self.layers).items()  # a Counter keeps the order
            )
        except SpecError as error:
            raise ModelError(f"{self.name}: {error}") from None

    def _kv_dtype(self, asked: str | None) -> str:
        if asked is None or asked == "auto":
            return self.dtype
        return "fp8_e4m3" if asked == "fp8" else asked

    def _split(self, what: str, heads: int, tp: int) -> int:
        if heads % tp:
            raise ModelError(f"{self.name}: {heads} {what} cannot be split over tp={tp} ranks: not divisible")
        return heads // tp

    def _split_kv_heads(self, heads: int, tp: int) -> int:
        if tp <= heads:
            return self._split("KV heads", heads, tp)
        if tp % heads:
            raise ModelError(f"{self.name}: {heads} KV heads cannot be replicated over tp={tp} ranks")
        return 1


def preset_names() -> tuple[str, ...]:
    """Names of the models that need no config.json."""
    return tuple(sorted(path.stem for path in _PRESETS.glob("*.json")))


def load_model(name_or_path: str) -> Model:
    """A preset by its name; otherwise the config.json at this path, or in the folder at this path.

    A folder that is called like a preset is reached as "./name". Raises ModelError, naming the file and the
    field, for what cannot be found, read or served.
    """
    name, fields = load_fields(name_or_path)
    max_position_embeddings = fields.integer("max_position_embeddings")
    assert max_position_embeddings is not None  # required by decoder_fields
    return Model(name, read_dtype(fields), max_position_embeddings, read_layers(fields))


def load_fields(name_or_path: str) -> tuple[str, Fields]:
    """Name and fields of the decoder that `load_model` finds there. Raises ModelError as it does."""
    if name_or_path in preset_names():
        preset = str(_PRESETS / f"{name_or_path}.json")
        return name_or_path, decoder_fields(preset, _read_object(preset))
    path = os.path.join(name_or_path, "config.json") if os.path.isdir(name_or_path) else name_or_path
    if not os.path.isfile(path):  # false as well for what cannot be reached, and for pipes that would block
        raise ModelError(
            f"{name_or_path!r} is neither a preset nor a config.json or a folder that holds one; "
            f"presets: {', '.join(preset_names())}"
        )
    whole = Path(os.path.abspath(path))
    name = whole.parent.name if whole.name == "config.json" else whole.stem
    return name, decoder_fields(path, _read_object(path))


def _read_object(path: str) -> dict[str, Any]:
    try:
        data = load(read_file(Path(path)))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    except RecursionError:
        raise ModelError(f"{path}: nested too deeply") from None
    except ValueError as error:  # bad JSON, bad UTF-8, a number of thousands of digits
        raise ModelError(f"{path}: not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path}: must hold a JSON object, holds {type(data).__name__}")
    return data
