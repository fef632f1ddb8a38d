"""What the gate feeds a candidate: row lengths around every border, and pages that are NaN wherever it may not look."""

from __future__ import annotations

import torch

from dispatch.backends.base import KVCache
from dispatch.bench.pool import RESERVED_PAGE, raw_bits
from dispatch.spec import AttentionSpec
from dispatch.step import StepInputs

LONGEST = 8192  # tokens of the longest row checked: many splits, and a reference that costs little


def row_lengths(spec: AttentionSpec, bucket: int, longest: int) -> dict[str, tuple[int, ...]]:
    """The lengths that the rows take one after the other, as requests come, grow, and go.

    "first": the longest row, then short ones around the borders of pages. "turned": the same in reverse, each a token
    longer and the longest some shorter. "short": only short rows, so that a bucket of one sees one too.
    """
    longest, page = min(longest, LONGEST), spec.page_size
    around = [17, 1, 2, 64, 300, 129, 5, 33, page, page + 1, max(1, page - 1), 3 * page + 1]
    short = tuple(min(around[i % len(around)], longest) for i in range(bucket))
    first = (longest, *short[1:])
    turned = tuple(n + 1 if n < longest else max(1, longest - 3) for n in reversed(first))
    return {"first": first, "turned": turned, "short": short}


def gate_pages(spec: AttentionSpec, bucket: int, longest: int) -> int:
    """Pages of the pool that the gate of a bucket writes to."""
    rows = row_lengths(spec, bucket, longest).values()
    return max(sum(spec.max_pages(n) for n in lengths) for lengths in rows)


def first_visible(spec: AttentionSpec, length: int) -> int:
    """The first token that the newest of `length` attends to."""
    return 0 if spec.sliding_window is None else max(0, length - spec.sliding_window)


def only_visible(spec: AttentionSpec, kv: KVCache, inputs: StepInputs) -> KVCache:
    """A copy of the pages in which every slot is NaN but those attended to and those of the reserved page.

    Slots that a sliding window has left behind are NaN too.
    """
    page = spec.page_size
    keep = torch.zeros(kv[0].shape[0] * page, dtype=torch.bool)
    keep[RESERVED_PAGE * page : (RESERVED_PAGE + 1) * page] = True
    table = inputs.block_table.cpu().long()
    for row, length in enumerate(inputs.lengths_host.tolist()):
        tokens = torch.arange(first_visible(spec, length), length)
        keep[table[row, tokens // page] * page + tokens % page] = True
    mask = keep.view(-1, page)
    mask = mask[:, :, None, None] if spec.kv_layout == "NHD" else mask[:, None, :, None]
    k, v = (_with_nan(pages, mask.to(pages.device)) for pages in kv)
    return k, v


def _with_nan(pages: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    nan = torch.full((1,), float("nan"), device=pages.device).to(pages.dtype)
    return torch.where(keep, raw_bits(pages), raw_bits(nan)).view(pages.dtype)
