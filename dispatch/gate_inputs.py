"""What the gate feeds a candidate: row lengths around every border, and pages that are NaN wherever it may not look."""

from __future__ import annotations

from itertools import cycle, islice

import torch

from dispatch.backends.base import KVCache
from dispatch.bench.pool import RESERVED_PAGE, raw_bits
from dispatch.spec import AttentionSpec
from dispatch.step import StepInputs

MOST_TOKENS = 131072  # of a set beside its first row: several long rows, at a cost of milliseconds on a GPU
LEFT_BEHIND = 200.0  # within fp8's range, and far above the unit normals that are visible
_NAN, _LEFT_BEHIND, _VISIBLE = range(3)
_SHORT = (17, 1, 2, 64, 300, 129, 5, 33)  # below, at and above the borders of kernels' tiles


def row_sets(spec: AttentionSpec, bucket: int, longest: int) -> list[tuple[int, ...]]:
    """The lengths that a bucket's rows take one set after the other, as requests come, grow, and go.

    Together they hold the longest, lengths at the borders of pages and of tiles, and a spread between; a small bucket
    takes more sets. The first row of the first set is the longest. The last set is the first in reverse, with every
    row a token longer and the longest some shorter.
    """
    page = spec.page_size
    borders = (page - 1, page, page + 1, 2 * page, 3 * page + 1)
    spread = (round(longest ** (i / 12)) for i in range(4, 12))
    below = (longest - 3, (longest - 1) // page * page)
    ascending = sorted({min(n, longest) for n in (*_SHORT, *borders, *spread) if n > 0} - {longest})
    wanted = [longest, *ascending, *(n for n in below if n > 0)]
    count = -(-len(wanted) // bucket)
    sets = [_fill(wanted[i::count], bucket, longest) for i in range(count)]
    turned = tuple(min(n + 1, longest) if n < longest else max(1, longest - 3) for n in reversed(sets[0]))
    return [*sets, turned]


def _fill(rows: list[int], bucket: int, longest: int) -> tuple[int, ...]:
    """As many rows as the bucket has, none above `longest`, and together of bounded size."""
    left = MOST_TOKENS
    filled = [rows[0]]
    for n in islice((*rows[1:], *islice(cycle(_SHORT), bucket)), bucket - 1):
        filled.append(min(n, longest) if n <= left else 1)
        left -= filled[-1]
    return tuple(filled)


def gate_pages(spec: AttentionSpec, bucket: int, longest: int) -> int:
    """Pages of the pool that the gate of a bucket writes to."""
    return max(sum(spec.max_pages(n) for n in lengths) for lengths in row_sets(spec, bucket, longest))


def first_visible(spec: AttentionSpec, length: int) -> int:
    """The first token that the newest of `length` attends to."""
    return 0 if spec.sliding_window is None else max(0, length - spec.sliding_window)


def only_visible(spec: AttentionSpec, kv: KVCache, inputs: StepInputs) -> KVCache:
    """A copy of the pages in which every slot is NaN but those of a row's tokens.

    So is the reserved page, at which the unused entries of the block table point; its first slot keeps its value
    where a padding row reads it. Tokens that a sliding window has left behind are no NaN, for they were real once, but
    large: whoever gives them any weight is far off.
    """
    page = spec.page_size
    state = torch.full((kv[0].shape[0] * page,), _NAN, dtype=torch.uint8, device=kv[0].device)
    table = inputs.block_table.long()
    for row, length in enumerate(inputs.lengths_host.tolist()):
        tokens = torch.arange(length, device=state.device)
        place = table[row, tokens // page] * page + tokens % page
        first = first_visible(spec, length)
        state[place[:first]] = _LEFT_BEHIND
        state[place[first:]] = _VISIBLE
    mask = state.view(-1, page)
    mask = mask[:, :, None, None] if spec.kv_layout == "NHD" else mask[:, None, :, None]
    k, v = (_hidden_filled(pages, mask) for pages in kv)
    return k, v


def position_code(spec: AttentionSpec, pages: torch.Tensor, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """V pages for the uniform probe, and what a kernel that reads the right keys counts.

    A coded token's V is one at a place that tells its position, row and head, and zero elsewhere. Counts: float32
    [rows, num_kv_heads, head_dim_vo]. In long rows the first and last 64 tokens and some between are coded, so
    that no count exceeds what a bf16 output holds exactly enough.
    """
    page, heads, places = spec.page_size, spec.num_kv_heads, spec.head_dim_vo
    coded = torch.zeros_like(raw_bits(pages)).view(pages.dtype)
    counts = torch.zeros(len(inputs.lengths_host), heads, places, device=pages.device)
    one = torch.ones(1, device=pages.device).to(pages.dtype)
    for row, length in enumerate(inputs.lengths_host.tolist()):
        first = first_visible(spec, length)
        tokens = torch.arange(first, length, device=pages.device)
        stride = max(1, (length - first) // 2048)
        tokens = tokens[(tokens < first + 64) | (tokens >= length - 64) | (tokens % stride == 0)]
        where = inputs.block_table[row].long()[tokens // page], tokens % page
        for head in range(heads):
            place = (tokens + 7 * head + row) % places
            at = (*where, head, place) if spec.kv_layout == "NHD" else (where[0], head, where[1], place)
            raw_bits(coded)[at] = raw_bits(one)
            counts[row, head] = torch.bincount(place, minlength=places)
    return coded, counts


def _hidden_filled(pages: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    nan, large = (torch.full((1,), x, device=pages.device).to(pages.dtype) for x in (float("nan"), LEFT_BEHIND))
    hidden = torch.where(state == _NAN, raw_bits(nan), raw_bits(large))
    return torch.where(state == _VISIBLE, raw_bits(pages), hidden).view(pages.dtype)


def reserved(pages: torch.Tensor, value: float) -> torch.Tensor:
    """A copy of the pages with another value in the first slot of the reserved page (in all slots of each head)."""
    changed = pages.clone()
    raw_bits(changed)[RESERVED_PAGE] = raw_bits(torch.full((1,), value, device=pages.device).to(pages.dtype))
    return changed
