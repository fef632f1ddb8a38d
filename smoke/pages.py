"""The paged KV cache of a small engine: pages of every layer, who has which, and how a token is stored."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dispatch.backends.base import KVCache
from dispatch.bench.pool import raw_bits
from dispatch.dtypes import TORCH_DTYPES
from dispatch.spec import AttentionSpec

RESERVED_PAGE = 0  # padding rows write and read here, and unused entries of a block table point at it

Slots = tuple[torch.Tensor, torch.Tensor]
"""Of each token: its page, and its place there; int64 [tokens]."""


class PagedCache:
    """`num_pages` pages beside the reserved one, zeroed, given out in shuffled order."""

    def __init__(self, spec: AttentionSpec, num_pages: int, device: torch.device, seed: int = 0) -> None:
        self.spec, self.device = spec, device
        shape = (num_pages + 1, spec.page_size, spec.num_kv_heads, spec.head_dim_qk)
        self.layers: list[KVCache] = [(self._pages(shape), self._pages(shape)) for _ in range(spec.num_layers)]
        self._free: list[int] = (np.random.RandomState(seed).permutation(num_pages) + 1).tolist()

    @property
    def free_pages(self) -> int:
        """Pages that nobody has."""
        return len(self._free)

    def grow(self, pages: list[int], tokens: int) -> None:
        """Add to a request's pages what `tokens` tokens need. Raises IndexError where none is left."""
        while len(pages) < self.spec.max_pages(tokens):
            pages.append(self._free.pop())

    def give_back(self, pages: list[int]) -> None:
        """Take a finished request's pages; what they hold stays there for the next owner to trip over."""
        self._free[:0] = pages
        pages.clear()

    def table(self, rows: Sequence[Sequence[int]], width: int) -> torch.Tensor:
        """Block table, int32 [rows, width], on the device."""
        padded = [[*pages, *[RESERVED_PAGE] * (width - len(pages))] for pages in rows]
        return torch.tensor(padded, dtype=torch.int32).to(self.device)

    def stored(self, tokens: torch.Tensor, scale: float) -> torch.Tensor:
        """K or V as the cache holds them; an fp8 cache holds them divided by `scale`."""
        return (tokens if scale == 1.0 else tokens / scale).to(TORCH_DTYPES[self.spec.kv_dtype])

    def write(self, layer: int, slots: Slots, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put stored K and V, [tokens, num_kv_heads, head_dim], where they belong."""
        for pages, tokens in zip(self.layers[layer], (k, v), strict=True):
            raw_bits(pages).index_put_(slots, raw_bits(tokens))

    def _pages(self, shape: tuple[int, ...]) -> torch.Tensor:
        pages = torch.empty(shape, dtype=TORCH_DTYPES[self.spec.kv_dtype], device=self.device)
        raw_bits(pages).zero_()
        return pages
