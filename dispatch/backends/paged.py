"""Reading a paged KV cache with plain torch."""

from __future__ import annotations

import torch

from dispatch.spec import AttentionSpec


def gather_heads(
    pages: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    start: int,
    spec: AttentionSpec,
    dtype: torch.dtype,
    scale: float,
) -> torch.Tensor:
    """Copy the pages of each row together, head by head: [rows, num_kv_heads, tokens, head_dim] in `dtype`.

    pages: K or V pages as AttentionSpec lays them out. table: int32 [rows, pages a row], of which the first begins
    at token `start`. lengths: int32 [rows]. Tokens that a row does not attend to come back as 0: what lies there
    may be NaN, and 0 * NaN is NaN. An fp8 cache is multiplied by `scale`.
    """
    is_fp8 = spec.kv_dtype == "fp8_e4m3"
    source = pages.view(torch.uint8) if is_fp8 else pages  # torch has no index kernel for fp8
    tokens = source.index_select(0, table.flatten())  # several times faster on a CPU than source[table]
    if spec.kv_layout == "HND":
        tokens = tokens.transpose(1, 2)
    tokens = tokens.reshape(table.shape[0], -1, spec.num_kv_heads, pages.shape[-1])
    _blank_hidden(tokens, lengths, start, spec)
    heads = (tokens.view(pages.dtype) if is_fp8 else tokens).transpose(1, 2)
    # a product with strided heads is ten times slower on a CPU than one with contiguous ones
    dense = heads.to(dtype, memory_format=torch.contiguous_format)
    return dense * scale if is_fp8 else dense


def visible(positions: torch.Tensor, lengths: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """Which positions each row's new token attends to: bool [rows, positions]."""
    ends = lengths[:, None]
    mask = positions[None, :] < ends
    if spec.sliding_window is not None:
        mask &= positions[None, :] >= ends - spec.sliding_window
    return mask


def _blank_hidden(tokens: torch.Tensor, lengths: torch.Tensor, start: int, spec: AttentionSpec) -> None:
    """Zero, in place, what is not visible of tokens [rows, tokens from `start`, heads, head_dim]."""
    count = tokens.shape[1]
    if tokens.device.type != "cpu":
        positions = torch.arange(start, start + count, device=tokens.device)
        tokens.masked_fill_(~visible(positions, lengths, spec)[:, :, None, None], 0)
        return
    for row, length in enumerate(lengths.tolist()):  # writes only what is hidden; masked_fill_ passes over it all
        end = max(0, length - start)
        tokens[row, end:].zero_()
        if spec.sliding_window is not None:
            tokens[row, : max(0, end - spec.sliding_window)].zero_()
