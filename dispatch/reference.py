"""The float32 reference that a candidate's numbers are compared with."""

from __future__ import annotations

import torch

from dispatch.backends.base import KVCache
from dispatch.spec import AttentionSpec
from dispatch.step import StepInputs


def reference_decode(
    spec: AttentionSpec, q: torch.Tensor, kv_cache: KVCache, inputs: StepInputs, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Softmax attention of one new token a row, a row at a time: float32 [num_live, num_qo_heads, head_dim_vo].

    softmax(soft_cap(scale * q K^T)) V over the visible tokens; a sink logit joins the denominator only.
    """
    rows = []
    for i in range(inputs.num_live):
        length = int(inputs.lengths_host[i])
        first = 0 if spec.sliding_window is None else max(0, length - spec.sliding_window)
        k, v = (
            _tokens(pages, inputs.block_table[i], first, length, spec) * scale
            for pages, scale in zip(kv_cache, (spec.k_scale, spec.v_scale), strict=True)
        )
        grouped = q[i].float().view(spec.num_kv_heads, spec.group_size, spec.head_dim_qk)
        logits = torch.matmul(grouped, k.permute(1, 2, 0)) * spec.scale
        if spec.logits_soft_cap is not None:
            logits = spec.logits_soft_cap * torch.tanh(logits / spec.logits_soft_cap)
        if sinks is not None:
            logits = torch.cat([logits, sinks.float().view(spec.num_kv_heads, spec.group_size, 1)], dim=-1)
        weights = torch.softmax(logits, dim=-1)[..., : length - first]
        rows.append(torch.matmul(weights, v.transpose(0, 1)).view(spec.num_qo_heads, spec.head_dim_vo))
    return torch.stack(rows)


def _tokens(pages: torch.Tensor, table: torch.Tensor, first: int, length: int, spec: AttentionSpec) -> torch.Tensor:
    """Tokens first..length of one row, float32 [tokens, num_kv_heads, head_dim]."""
    first_page = first // spec.page_size
    own = table[first_page : spec.max_pages(length)].long()
    raw = pages.view(torch.uint8)[own].view(pages.dtype) if spec.kv_dtype == "fp8_e4m3" else pages[own]
    if spec.kv_layout == "HND":
        raw = raw.transpose(1, 2)
    tokens = raw.reshape(-1, spec.num_kv_heads, raw.shape[-1]).float()
    return tokens[first - first_page * spec.page_size : length - first_page * spec.page_size]
