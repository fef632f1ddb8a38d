"""A paged KV cache of the bench's own, and the inputs of a step over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from dispatch.backends.base import KVCache
from dispatch.dtypes import TORCH_DTYPES
from dispatch.errors import MeasureError
from dispatch.spec import DTYPE_BYTES, AttentionSpec
from dispatch.step import StepInputs

RESERVED_PAGE = 0  # what padding rows and unused table entries point at
_CHUNK_PAGES = 4096  # random numbers are drawn in pieces, so that a large pool needs no second one


@dataclass(frozen=True)
class Chain:
    """What the layers of a step work on: one q, and for each layer its own KV cache and output.

    `guarded_outs`: [layers, batch + 2, num_qo_heads, head_dim_vo], each output with a row before and a row behind it,
    which nothing may write to.
    """

    q: torch.Tensor
    kv_caches: tuple[KVCache, ...]
    guarded_outs: torch.Tensor
    sinks: torch.Tensor | None

    @cached_property  # not made anew within what is timed
    def outs(self) -> tuple[torch.Tensor, ...]:
        """[batch, num_qo_heads, head_dim_vo] of each layer."""
        return tuple(whole[1:-1] for whole in self.guarded_outs)


class PagedPool:
    """`num_layers` KV caches of `num_pages` pages each, beside the reserved one, filled with random numbers."""

    def __init__(self, spec: AttentionSpec, num_pages: int, num_layers: int, device: torch.device) -> None:
        self.spec, self.num_pages, self.device = spec, num_pages, device
        self.random = torch.Generator(device).manual_seed(0)
        self.kv_caches = tuple(self._cache() for _ in range(num_layers))
        self.randomise(num_pages + 1)
        self._orders: dict[tuple[int, int], torch.Tensor] = {}  # by pages, and the width of a block table
        self._columns: dict[int, torch.Tensor] = {}
        self._host_random = np.random.default_rng(0)

    def randomise(self, count: int) -> None:
        """Fill the first pages of every layer with unit normals."""
        for pages in (pages for cache in self.kv_caches for pages in cache):
            for start in range(0, count, _CHUNK_PAGES):
                part = pages[start : min(start + _CHUNK_PAGES, count)]
                part.copy_(torch.randn(part.shape, generator=self.random, device=self.device, dtype=torch.float32))

    def inputs(self, bucket: int, max_kv: int) -> StepInputs:
        """Buffers for a bucket, all rows of length 1 on the reserved page."""
        return StepInputs(
            num_live=bucket,
            lengths_host=torch.ones(bucket, dtype=torch.int32),
            lengths=torch.ones(bucket, dtype=torch.int32, device=self.device),
            block_table=torch.full(
                (bucket, self.spec.max_pages(max_kv)), RESERVED_PAGE, dtype=torch.int32, device=self.device
            ),
        )

    def chain(self, bucket: int) -> Chain:
        """Random queries, and outputs, for a bucket."""
        spec, dtype = self.spec, TORCH_DTYPES[self.spec.dtype]
        width = spec.num_qo_heads * spec.head_dim_qk
        rows = torch.randn(bucket, spec.q_stride or width, generator=self.random, device=self.device).to(dtype)
        q = rows[:, :width].view(bucket, spec.num_qo_heads, spec.head_dim_qk)
        out_shape = (len(self.kv_caches), bucket + 2, spec.num_qo_heads, spec.head_dim_vo)
        outs = torch.empty(out_shape, dtype=dtype, device=self.device)
        sinks = None
        if spec.has_sinks:
            sinks = torch.randn(spec.num_qo_heads, generator=self.random, device=self.device)
        return Chain(q, self.kv_caches, outs, sinks)

    def shuffle(self) -> None:
        """Give out pages in a new order from now on."""
        self._orders.clear()

    def load(
        self, inputs: StepInputs, lengths: Sequence[int] | NDArray[np.int64], num_pages: int | None = None
    ) -> None:
        """Give every row pages of its own, in random order out of the whole pool, and set its length, in place.

        The order is that of the last `shuffle`, from another page on each time. Rows behind the last of `lengths` are
        padding, as an engine pads: of length 1 on the reserved page. `num_pages`: use only the first so many of the
        pool. Raises MeasureError where they are too few.
        """
        tokens = np.asarray(lengths, dtype=np.int32)
        pages = -(-tokens // self.spec.page_size)
        have, needed, live = num_pages or self.num_pages, int(pages.sum()), len(tokens)
        if needed > have:
            raise MeasureError(f"the rows need {needed} pages; the pool has {have}")
        bucket, width = inputs.block_table.shape
        # All that is to be told the device in one piece: this is done in every round of every cell.
        told = np.zeros((3, bucket), dtype=np.int32)
        told[0, :live], told[0, live:] = tokens, 1
        told[1, :live] = int(self._host_random.integers(have)) + pages.cumsum() - pages
        told[2, :live] = pages
        on_host = torch.from_numpy(told)
        on_device = on_host.to(self.device, non_blocking=True)
        inputs.num_live = live
        inputs.lengths_host.copy_(on_host[0])
        inputs.lengths.copy_(on_device[0])
        firsts, counts = on_device[1:, :, None]
        order, column = self._order(have, width)
        torch.index_select(order, 0, (firsts + column).view(-1), out=inputs.block_table.view(-1))
        inputs.block_table.masked_fill_(column >= counts, RESERVED_PAGE)

    def _order(self, have: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first `have` pages in random order, and the columns of a block table of this width; int32.

        Twice, so that any page may come first, and behind it as many as a table is wide, so that a row may begin
        anywhere.
        """
        if (have, width) not in self._orders:
            order = torch.randperm(have, generator=self.random, device=self.device, dtype=torch.int32) + 1
            behind = torch.zeros(width, dtype=torch.int32, device=self.device)
            self._orders[have, width] = torch.cat((order, order, behind))
        if width not in self._columns:
            self._columns[width] = torch.arange(width, dtype=torch.int32, device=self.device)
        return self._orders[have, width], self._columns[width]

    def _cache(self) -> KVCache:
        spec = self.spec
        if not spec.is_packed:
            return self._pages(spec.head_dim_qk), self._pages(spec.head_dim_vo)
        both = self._pages(spec.head_dim_qk + spec.head_dim_vo)
        return both[..., : spec.head_dim_qk], both[..., spec.head_dim_qk :]

    def _pages(self, head_dim: int) -> torch.Tensor:
        spec = self.spec
        inner = (spec.page_size, spec.num_kv_heads) if spec.kv_layout == "NHD" else (spec.num_kv_heads, spec.page_size)
        shape = (self.num_pages + 1, *inner, head_dim)
        dtype = TORCH_DTYPES[spec.kv_dtype]
        if spec.kv_strides is None:
            return torch.empty(shape, dtype=dtype, device=self.device)
        return torch.empty_strided(shape, (*spec.kv_strides, 1), dtype=dtype, device=self.device)


def raw_bits(pages: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes where it holds fp8, for which torch lacks most operations."""
    return pages.view(torch.uint8) if pages.dtype is torch.float8_e4m3fn else pages


def page_bytes(spec: AttentionSpec) -> int:
    """Bytes of one page of K and V of one layer, with the gaps that its strides leave."""
    if spec.kv_strides is None:
        return spec.page_size * spec.kv_bytes_per_token
    return (1 if spec.is_packed else 2) * spec.kv_strides[0] * DTYPE_BYTES[spec.kv_dtype]
