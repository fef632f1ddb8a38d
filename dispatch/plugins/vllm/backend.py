"""vLLM's FlashAttention backend, of which decode steps may be served by another kernel."""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm import _custom_ops
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from dispatch.plugins.vllm.decode import Decoder
from dispatch.plugins.vllm.refusals import refusal

QUANTISES = "dynamic_decode_quantises_q"
"""Among a model's custom ops: see `_other_model`."""


class DynamicBackend(FlashAttentionBackend):
    """By the same name: vLLM asks for it here and there."""

    @staticmethod
    def get_impl_cls() -> type[DynamicImpl]:
        return DynamicImpl

    @staticmethod
    def get_builder_cls() -> type[DynamicBuilder]:
        return DynamicBuilder


class DynamicBuilder(FlashAttentionMetadataBuilder):
    """Asks the plan which kernel serves a decode step. Everything else, and what the plan does not know, is as before.

    `decoder`: set once there is a plan, before graphs are captured.
    """

    supports_update_block_table = False  # what serves a step has its own block table

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.decoder: Decoder | None = None

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashAttentionMetadata:
        decoder, build = self.decoder, super().build
        step = None if decoder is None else decoder.step(common_prefix_len, common_attn_metadata)
        if decoder is None or step is None:
            return build(common_prefix_len, common_attn_metadata, fast_build)
        # FA3's schedule is for nobody, unless no graph has what all layer groups chose. A first build finds the window.
        unscheduled = decoder.serves and self.aot_sliding_window is not None
        metadata = build(common_prefix_len, common_attn_metadata, fast_build or unscheduled)
        if unscheduled:
            decoder.schedule = functools.partial(build, common_prefix_len, common_attn_metadata, fast_build)
        metadata.decode_dispatch = step
        return metadata


class DynamicImpl(FlashAttentionImpl):
    """Over an fp8 cache FlashAttention-3 takes Q quantised, and other kernels do not: so it is quantised here, and not
    by the layer, which asks `supports_quant_query_input` when it is made.

    Not in a second engine of the process that is refused: vLLM remembers which backend the first one's layers got.
    `q_stride`: elements from one token's Q to the next one's; None where Q is dense. Known from the profiling run on.
    """

    q_stride: int | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = get_current_vllm_config_or_none()
        is_fp8 = self.supports_quant_query_input and self.kv_cache_dtype.startswith("fp8")
        self.quantises = is_fp8 and config is not None and not refusal(config)
        if self.quantises:
            self.supports_quant_query_input = False
            _other_model(config.compilation_config)

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FlashAttentionMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        step = getattr(attn_metadata, "decode_dispatch", None)
        if step is not None:
            rows = attn_metadata.num_actual_tokens
            step.attend(query[:rows], kv_cache, output[:rows])
            return output
        if attn_metadata is None:
            self.q_stride = None if query.is_contiguous() else query.stride(0)
        if self.quantises:
            self.supports_quant_query_input = True  # the base class now takes the scale of Q
            query = _quantised(query, layer._q_scale, self.num_queries_per_kv)
        return super().forward(
            layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
        )


def _other_model(compilation: Any) -> None:
    """Have vLLM's cache of compiled models take it for another one, as its layers hand on Q as it is.

    Custom ops are part of the key, and the copies of a configuration that parts of a model are made with share them.
    """
    if f"+{QUANTISES}" not in compilation.custom_ops:
        compilation.custom_ops.append(f"+{QUANTISES}")
    compilation.enabled_custom_ops.update([QUANTISES])  # or vLLM warns that the model has no such op


def _quantised(query: torch.Tensor, scale: torch.Tensor, heads_of_a_group: int) -> torch.Tensor:
    """Q [tokens, heads, head_dim] as the layer would have quantised it: with one scale, or one for each KV head."""
    groups = {} if scale.numel() == 1 else {"group_shape": (-1, heads_of_a_group * query.shape[-1])}
    flat, _ = _custom_ops.scaled_fp8_quant(query.reshape(len(query), -1), scale, **groups)
    return flat.view(query.shape)
