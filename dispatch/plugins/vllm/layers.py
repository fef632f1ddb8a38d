"""vLLM's attention layers as AttentionSpecs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides

from dispatch.errors import SpecError
from dispatch.spec import AttentionSpec

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
FP8 = ("fp8", "fp8_e4m3")


def spec_of(layers: Mapping[str, Any], names: Sequence[str], block_size: int, layout: str) -> AttentionSpec:
    """Of the layers of one metadata builder, after the KV cache is bound to them.

    `block_size`: of the kernel's block table. `layout`: vLLM's, NHD or HND. Raises SpecError where a layer has what no
    candidate serves, or the layers differ.
    """
    specs = {_spec_of(layers[name], len(names), block_size, layout) for name in names}
    if len(specs) > 1:
        raise SpecError(f"{len(names)} layers of one group differ in their attention")
    return specs.pop()


def scales_of(layer: Any) -> tuple[float, float, float]:
    """Of Q, K and V over an fp8 cache. They change where weights are reloaded."""
    return layer._q_scale_float, layer._k_scale_float, layer._v_scale_float


def _spec_of(layer: Any, num_layers: int, block_size: int, layout: str) -> AttentionSpec:
    impl, pages = layer.impl, layer.kv_cache
    if impl.attn_type != "decoder":
        raise SpecError(f"attention of type {impl.attn_type}")
    if impl.alibi_slopes is not None:
        raise SpecError("ALiBi slopes")
    if layer.kv_sharing_target_layer_name is not None:
        raise SpecError("layers that share a KV cache")
    if impl.sinks is not None:
        raise SpecError("attention sinks: not handed to other kernels yet")
    if impl.vllm_flash_attn_version != 3:
        raise SpecError(f"FlashAttention {impl.vllm_flash_attn_version} serves the layer, and not 3")
    shape = (impl.num_kv_heads, block_size, 2 * impl.head_size)
    if not isinstance(pages, torch.Tensor) or pages.shape[1:] != shape:
        raise SpecError("a KV cache that is not [blocks, kv_heads, block, 2 x head_dim]")
    is_fp8 = impl.kv_cache_dtype in FP8
    if not is_fp8 and pages.dtype not in DTYPES:
        raise SpecError(f"a KV cache of {impl.kv_cache_dtype}")
    if is_fp8 and layer.calculate_kv_scales:
        raise SpecError("scales of the KV cache that are calculated at run time")
    if is_fp8 and layer._k_scale.numel() + layer._v_scale.numel() != 2:
        raise SpecError("a KV cache with a scale for each head")
    if is_fp8 and layer._q_scale_float != 1.0:
        raise SpecError(f"a scale of {layer._q_scale_float:g} for Q: other kernels quantise it with 1")
    dtype = DTYPES.get(layer.dtype)
    if dtype is None:
        raise SpecError("activations that are neither bf16 nor fp16")
    page, head, token = canonicalize_singleton_dim_strides(pages).stride()[:3]
    window, right = impl.sliding_window
    if right not in (-1, 0):
        raise SpecError("a window to both sides")
    return AttentionSpec(
        num_qo_heads=impl.num_heads,
        num_kv_heads=impl.num_kv_heads,
        head_dim_qk=impl.head_size,
        head_dim_vo=impl.head_size,
        page_size=block_size,
        num_layers=num_layers,
        dtype=dtype,
        kv_dtype="fp8_e4m3" if is_fp8 else dtype,
        kv_layout=layout,
        kv_strides=(page, token, head) if layout == "NHD" else (page, head, token),
        q_stride=impl.q_stride,
        k_scale=layer._k_scale_float if is_fp8 else 1.0,
        v_scale=layer._v_scale_float if is_fp8 else 1.0,
        sm_scale=impl.scale,
        sliding_window=None if window < 0 else window + 1,
        logits_soft_cap=impl.logits_soft_cap or None,
    )
