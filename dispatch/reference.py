"""The float32 reference that a candidate's numbers are compared with."""

from __future__ import annotations

import torch

from dispatch.backends.base import KVCache
from dispatch.spec import AttentionSpec
from dispatch.step import StepInputs


def reference_decode(
    spec: AttentionSpec, q: torch.Tensor, kv_cache: KVCache, inputs: StepInputs, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Softmax attention of one new token a row: float32 [num_live, num_qo_heads, head_dim_vo].

    softmax(soft_cap(scale * q K^T)) V over the visible tokens; a sink logit joins the denominator only. Rows of the
    same length are computed together: of them, none has a token that another has not.
    """
    lengths = inputs.lengths_host[: inputs.num_live]
    out = torch.empty(inputs.num_live, spec.num_qo_heads, spec.head_dim_vo, device=q.device)
    for length in sorted(set(lengths.tolist())):
        alike = (lengths == length).nonzero()[:, 0].to(q.device)
        at_once = max(1, spec.max_pages(int(lengths.max())) // spec.max_pages(length))  # no more than the longest row
        for rows in alike.split(at_once):
            out[rows] = _alike(spec, q[rows], kv_cache, inputs.block_table[rows], length, sinks)
    return out


def _alike(
    spec: AttentionSpec,
    q: torch.Tensor,
    kv_cache: KVCache,
    table: torch.Tensor,
    length: int,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Rows of one length: float32 [rows, num_qo_heads, head_dim_vo]."""
    first = 0 if spec.sliding_window is None else max(0, length - spec.sliding_window)
    k, v = (
        _tokens(pages, table, first, length, spec) * scale
        for pages, scale in zip(kv_cache, (spec.k_scale, spec.v_scale), strict=True)
    )
    grouped = q.float().view(-1, spec.num_kv_heads, spec.group_size, spec.head_dim_qk)
    logits = torch.matmul(grouped, k.permute(0, 2, 3, 1)) * spec.scale
    if spec.logits_soft_cap is not None:
        logits = spec.logits_soft_cap * torch.tanh(logits / spec.logits_soft_cap)
    if sinks is not None:
        of_heads = sinks.float().view(1, spec.num_kv_heads, spec.group_size, 1)
        logits = torch.cat([logits, of_heads.expand(len(q), -1, -1, -1)], dim=-1)
    weights = torch.softmax(logits, dim=-1)[..., : length - first]
    return torch.matmul(weights, v.transpose(1, 2)).view(-1, spec.num_qo_heads, spec.head_dim_vo)


def _tokens(pages: torch.Tensor, table: torch.Tensor, first: int, length: int, spec: AttentionSpec) -> torch.Tensor:
    """Tokens first..length of each row, float32 [rows, tokens, num_kv_heads, head_dim]."""
    first_page = first // spec.page_size
    own = table[:, first_page : spec.max_pages(length)].long()
    raw = pages.view(torch.uint8)[own].view(pages.dtype) if spec.kv_dtype == "fp8_e4m3" else pages[own]
    if spec.kv_layout == "HND":
        raw = raw.transpose(2, 3)
    tokens = raw.reshape(len(table), -1, spec.num_kv_heads, raw.shape[-1]).float()
    return tokens[:, first - first_page * spec.page_size : length - first_page * spec.page_size]
