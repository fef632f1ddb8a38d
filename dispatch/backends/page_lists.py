"""The pages of a batch as FlashInfer's planned kernels want them: CSR on the device; without pages on the host too."""

from __future__ import annotations

import numpy as np
import torch


class PageLists:
    """The pages of each row as CSR, in buffers that never move.

    Row i has pages indices[indptr[i] : indptr[i + 1]], the last of which holds last_page_len[i] tokens.
    """

    def __init__(self, batch_size: int, max_pages: int, page_size: int, device: torch.device) -> None:
        self.max_pages, self.page_size = max_pages, page_size
        self.indptr = torch.zeros(batch_size + 1, dtype=torch.int32, device=device)
        self.last_page_len = torch.ones(batch_size, dtype=torch.int32, device=device)
        self.indices = torch.zeros(batch_size * max_pages + 1, dtype=torch.int32, device=device)  # + 1: see `fill`
        self.columns = torch.arange(max_pages, device=device)

    def measure(self, lengths: torch.Tensor) -> torch.Tensor:
        """Set indptr and last_page_len; the number of pages of each row. Static shapes: a graph can capture it."""
        pages = (lengths + (self.page_size - 1)) // self.page_size
        torch.cumsum(pages, 0, dtype=torch.int32, out=self.indptr[1:])
        torch.sub(lengths, (pages - 1) * self.page_size, out=self.last_page_len)
        return pages

    def fill(self, lengths: torch.Tensor, block_table: torch.Tensor) -> None:
        """Set everything from [rows] and [rows, pages], on the device. Unused entries land in the buffer's last."""
        pages = self.measure(lengths)
        table, columns = block_table[:, : self.max_pages], self.columns[: block_table.shape[1]]
        place = self.indptr[:-1, None] + columns
        place.masked_fill_(columns >= pages[:, None], len(self.indices) - 1)
        self.indices.scatter_(0, place.flatten(), table.flatten())


class HostPageLists:
    """The same without the pages themselves, on the host; plan() is in every step, so in numpy, at a third of the time.

    `indptr`, `last_page_len`: int32 tensors as in PageLists.
    """

    def __init__(self, batch_size: int, page_size: int) -> None:
        self.page_size = page_size
        self._indptr = np.zeros(batch_size + 1, dtype=np.int32)
        self._last_page_len = np.ones(batch_size, dtype=np.int32)
        self.indptr, self.last_page_len = torch.from_numpy(self._indptr), torch.from_numpy(self._last_page_len)

    def measure(self, lengths: torch.Tensor) -> None:
        """Set both, in place, from int32 [rows]."""
        tokens = lengths.numpy()
        full = (tokens - 1) // self.page_size  # pages before the last
        np.cumsum(full + 1, out=self._indptr[1:])
        np.subtract(tokens, full * self.page_size, out=self._last_page_len)
