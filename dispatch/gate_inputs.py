"""What the gate feeds a candidate: row lengths around every border, and pages that are NaN wherever it may not look."""

from __future__ import annotations

from itertools import cycle, islice

import torch

from dispatch.backends.base import KVCache
from dispatch.bench.pool import RESERVED_PAGE, raw_bits
from dispatch.spec import AttentionSpec
from dispatch.step import StepInputs

MOST_TOKENS = 32768  # of a set beside its first row: more than one long row, in bounded memory
LEFT_BEHIND = 200.0  # within fp8's range, and far above the unit normals that are visible
_NAN, _LEFT_BEHIND, _VISIBLE = range(3)
_SHORT = (17, 1, 2, 64, 300, 129, 5, 33)  # below, at and above the borders of kernels' tiles


def row_sets(spec: AttentionSpec, bucket: int, longest: int, most_tokens: int = MOST_TOKENS) -> list[tuple[int, ...]]:
    """The lengths that a bucket's rows take one set after the other, as requests come, grow, and go.

    Together they hold the longest, lengths at the borders of pages and of tiles, and a spread between; a small bucket
    takes more sets. The first row of the first set is the longest. The last set is the first in reverse, with every
    row a token longer and the longest some shorter. `most_tokens`: of a set beside its first row; above it, rows are of
    one token.
    """
    page = spec.page_size
    borders = (page - 1, page, page + 1, 2 * page, 3 * page + 1)
    spread = (round(longest ** (i / 12)) for i in range(4, 12))
    below = (longest - 3, (longest - 1) // page * page)
    ascending = sorted({min(n, longest) for n in (*_SHORT, *borders, *spread) if n > 0} - {longest})
    wanted = [longest, *ascending, *(n for n in below if n > 0)]
    count = -(-len(wanted) // bucket)
    sets = [_fill(wanted[i::count], bucket, longest, most_tokens) for i in range(count)]
    turned = tuple(min(n + 1, longest) if n < longest else max(1, longest - 3) for n in reversed(sets[0]))
    return [*sets, turned]


def _fill(rows: list[int], bucket: int, longest: int, most_tokens: int) -> tuple[int, ...]:
    """As many rows as the bucket has, none above `longest`, and together of bounded size."""
    left = most_tokens
    filled = [rows[0]]
    for n in islice((*rows[1:], *islice(cycle(_SHORT), bucket)), bucket - 1):
        filled.append(min(n, longest) if n <= left else 1)
        left -= filled[-1]
    return tuple(filled)


def gate_pages(spec: AttentionSpec, bucket: int, longest: int, most_tokens: int = MOST_TOKENS) -> int:
    """Pages of the pool that the gate of a bucket writes to."""
    return max(sum(spec.max_pages(n) for n in lengths) for lengths in row_sets(spec, bucket, longest, most_tokens))


def only_visible(spec: AttentionSpec, kv: KVCache, inputs: StepInputs, finite: bool) -> KVCache:
    """A copy of the pages in which every slot is NaN (`finite`: large) but those of a row's tokens.

    So is the reserved page, at which the unused entries of the block table point; its first slot keeps its value
    where a padding row reads it. Tokens that a sliding window has left behind are no NaN, for they were real once, but
    large: whoever gives them any weight is far off.
    """
    tokens = _Tokens(spec, inputs)
    hidden = _LEFT_BEHIND if finite else _NAN
    state = torch.full((kv[0].shape[0], spec.page_size), hidden, dtype=torch.uint8, device=kv[0].device)
    state[tokens.page, tokens.slot] = torch.where(tokens.position < tokens.first, _LEFT_BEHIND, _VISIBLE).to(
        state.dtype
    )
    mask = state[:, :, None, None] if spec.kv_layout == "NHD" else state[:, None, :, None]
    k, v = (_hidden_filled(pages, mask) for pages in kv)
    return k, v


def position_code(spec: AttentionSpec, pages: torch.Tensor, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """V pages for the uniform probe, and what a kernel that reads the right keys counts.

    A coded token's V is one at a place that tells its position, row and head, and zero elsewhere. Counts: float32
    [rows, num_kv_heads, head_dim_vo]. In long rows the first and last 64 tokens and some between are coded, so
    that no count exceeds what a bf16 output holds exactly enough.
    """
    heads, places = spec.num_kv_heads, spec.head_dim_vo
    coded = torch.zeros_like(raw_bits(pages)).view(pages.dtype)
    counts = torch.zeros(len(inputs.lengths_host), heads, places, device=pages.device)
    one = torch.ones(1, device=pages.device).to(pages.dtype)
    t = _Tokens(spec, inputs)
    stride = ((t.length - t.first) // 2048).clamp_min(1)
    is_coded = (t.position < t.first + 64) | (t.position >= t.length - 64) | (t.position % stride == 0)
    is_coded &= t.position >= t.first
    row, position, page, slot = (x[is_coded] for x in (t.row, t.position, t.page, t.slot))
    for head in range(heads):
        place = (position + 7 * head + row) % places
        at = (page, slot, head, place) if spec.kv_layout == "NHD" else (page, head, slot, place)
        raw_bits(coded)[at] = raw_bits(one)
        counts[:, head].index_put_((row, place), torch.ones_like(place, dtype=counts.dtype), accumulate=True)
    return coded, counts


class _Tokens:
    """Every token of every row, int64 [tokens] each: where it is, and its row's length and first visible token."""

    def __init__(self, spec: AttentionSpec, inputs: StepInputs) -> None:
        lengths = inputs.lengths.long()
        self.row = torch.repeat_interleave(lengths)
        self.length = lengths[self.row]
        self.position = torch.arange(len(self.row), device=lengths.device) - (lengths.cumsum(0) - lengths)[self.row]
        self.page = inputs.block_table[self.row, self.position // spec.page_size].long()
        self.slot = self.position % spec.page_size
        window = spec.sliding_window
        self.first = torch.zeros_like(self.length) if window is None else (self.length - window).clamp_min(0)


def _hidden_filled(pages: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    nan, large = (torch.full((1,), x, device=pages.device).to(pages.dtype) for x in (float("nan"), LEFT_BEHIND))
    hidden = torch.where(state == _NAN, raw_bits(nan), raw_bits(large))
    return torch.where(state == _VISIBLE, raw_bits(pages), hidden).view(pages.dtype)


def reserved(pages: torch.Tensor, value: float) -> torch.Tensor:
    """A copy of the pages with another value in the first slot of the reserved page (in all slots of each head)."""
    changed = pages.clone()
    raw_bits(changed)[RESERVED_PAGE] = raw_bits(torch.full((1,), value, device=pages.device).to(pages.dtype))
    return changed
