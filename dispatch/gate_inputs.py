"""What the gate feeds a candidate: row lengths around every border, and pages that are NaN wherever it may not look."""

from __future__ import annotations

import torch

from dispatch.backends.base import KVCache
from dispatch.bench.pool import RESERVED_PAGE, raw_bits
from dispatch.spec import AttentionSpec
from dispatch.step import StepInputs

LONGEST = 8192  # tokens of the longest row checked: many splits, and a reference that costs little
SHORT_LENGTHS = (1, 17, 2, 64, 300, 129, 5, 33)  # below, at and above the borders of pages and of kernels' tiles


def first_lengths(spec: AttentionSpec, bucket: int, longest: int) -> tuple[int, ...]:
    """The longest row first, then short ones around the borders of pages."""
    longest, page = min(longest, LONGEST), spec.page_size
    short = [*SHORT_LENGTHS, page, page + 1, max(1, page - 1), 3 * page + 1]
    return (longest, *(min(short[i % len(short)], longest) for i in range(bucket - 1)))


def turned_lengths(spec: AttentionSpec, bucket: int, longest: int) -> tuple[int, ...]:
    """The same rows in reverse, each a token longer: every row has changed, as after requests came and went."""
    return tuple(min(n + 1, longest, LONGEST) for n in reversed(first_lengths(spec, bucket, longest)))


def gate_pages(spec: AttentionSpec, bucket: int, longest: int) -> int:
    """Pages of the pool that the gate of a bucket writes to."""
    rows = (first_lengths(spec, bucket, longest), turned_lengths(spec, bucket, longest))
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
