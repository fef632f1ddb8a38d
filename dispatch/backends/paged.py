"""Reading a paged KV cache with plain torch."""

from __future__ import annotations

import torch

from dispatch.spec import AttentionSpec


def gather_tokens(
    pages: torch.Tensor, table: torch.Tensor, spec: AttentionSpec, dtype: torch.dtype, scale: float
) -> torch.Tensor:
    """Copy the pages of each row together: [rows, tokens, num_kv_heads, head_dim] in `dtype`.

    pages: K or V pages as AttentionSpec lays them out. table: int [rows, pages a row]. An fp8 cache is multiplied
    by `scale`.
    """
    is_fp8 = spec.kv_dtype == "fp8_e4m3"
    source = pages.view(torch.uint8) if is_fp8 else pages  # torch has no index kernel for fp8
    tokens = source[table]
    if spec.kv_layout == "HND":
        tokens = tokens.transpose(2, 3)
    tokens = tokens.reshape(table.shape[0], -1, spec.num_kv_heads, pages.shape[-1])
    if is_fp8:
        return tokens.view(pages.dtype).to(dtype) * scale
    return tokens.to(dtype)


def visible(positions: torch.Tensor, lengths: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """Which positions each row's new token attends to: bool [rows, positions]."""
    ends = lengths[:, None]
    mask = positions[None, :] < ends
    if spec.sliding_window is not None:
        mask &= positions[None, :] >= ends - spec.sliding_window
    return mask
