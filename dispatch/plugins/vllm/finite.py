"""Whether vLLM's KV cache holds nothing but finite numbers, which a kernel may read behind a row's end."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_cache_interface import AttentionSpec, UniformTypeKVCacheSpecs


def is_finite(config: Any, kv_cache_config: Any) -> bool:
    """Whether a page holds zeros, or K and V that this engine computed from tokens, and is read as what it was written.

    Pages are zeroed when they are allocated, and not between requests; all layer groups draw them from one pool. So not
    where another group's numbers have another dtype, or are a mamba layer's state; where a wake-up puts fresh memory
    behind the pages; where a user hands in embeddings; or where K and V may come from elsewhere.
    """
    model = config.model_config
    images = model.multimodal_config is not None and model.multimodal_config.enable_mm_embeds
    if model.enable_sleep_mode or model.enable_prompt_embeds or images or config.kv_transfer_config is not None:
        return False
    specs: list[Any] = []
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        specs += spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
    return all(isinstance(spec, AttentionSpec) for spec in specs) and len({spec.dtype for spec in specs}) == 1
