"""A narrower, contiguous page table for kernels that split by its width (DESIGN 2.5)."""

from __future__ import annotations

import torch

from dispatch.spec import AttentionSpec

# Above so many KV heads in a batch, the card is full without splitting a row, and the width no longer matters.
MOST_KV_HEADS = 4
NARROW_KV = (4096, 16384)  # tokens; 13 us instead of 30 and 20 instead of 30 at a width for 131072


def narrow_tactics(spec: AttentionSpec, batch_size: int, max_kv: int) -> tuple[str, ...]:
    """The full width, and narrower ones where a batch has few KV heads."""
    if batch_size * spec.num_kv_heads > MOST_KV_HEADS:
        return ("",)
    return ("", *(f"max_kv={tokens}" for tokens in NARROW_KV if tokens < max_kv))


class NarrowTable:
    """The first pages of each row, as a contiguous table that never moves.

    A kernel takes the stride of a row from the table's width: a slice of a wider one would read the wrong pages.
    """

    def __init__(self, pages: int) -> None:
        """`pages`: those of the longest row that the kernel is built for."""
        self.pages = pages
        self._copy: torch.Tensor | None = None

    def read(self, block_table: torch.Tensor) -> torch.Tensor:
        """int32 [batch, pages]: the block table itself where it fits already, or a copy. Capturable."""
        if block_table.shape[1] <= self.pages and block_table.is_contiguous():
            return block_table
        part = block_table[:, : self.pages]
        if self._copy is None:
            self._copy = torch.empty(part.shape, dtype=part.dtype, device=part.device)
        self._copy.copy_(part)
        return self._copy
