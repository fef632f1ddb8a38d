"""The buffers that captured graphs read: made once for the largest bucket, refreshed in place, never moved."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dispatch.engine.groups import LayerGroup
from dispatch.step import StepInputs


class StepBuffers:
    """Lengths for all layer groups, and a block table for each. A bucket's are the first rows of the largest's."""

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        buckets: Sequence[int],
        max_seq_len: int,
        reserved_page: int,
        device: torch.device,
    ) -> None:
        """`reserved_page`: where padding rows read and write; no request ever has it."""
        rows = buckets[-1]
        self.groups, self.reserved_page = tuple(groups), reserved_page
        self.lengths_host = torch.ones(rows, dtype=torch.int32)
        self._host_values = self.lengths_host.numpy()  # the same memory, at a third of the time a write
        self.lengths = torch.ones(rows, dtype=torch.int32, device=device)
        shapes = [(rows, group.spec.max_pages(max_seq_len)) for group in groups]
        self.tables = [torch.full(shape, reserved_page, dtype=torch.int32, device=device) for shape in shapes]
        self._reserved = torch.tensor(reserved_page, dtype=torch.int32, device=device)
        self._used = 0  # rows of the tables that hold requests' pages
        self._inputs = {bucket: self._of(bucket) for bucket in buckets}

    def inputs(self, bucket: int) -> tuple[StepInputs, ...]:
        """Of each layer group; the same objects at every step."""
        return self._inputs[bucket]

    def refresh(
        self,
        bucket: int,
        lengths_host: torch.Tensor,
        block_tables: Sequence[torch.Tensor],
        lengths: torch.Tensor | None = None,
    ) -> None:
        """Put a step's requests into the first rows, and rows of length 1 on the reserved page behind them.

        lengths_host: int32 [live], on the host. block_tables: of each group, int32 [live, pages], on the device; -1
        where a sliding window has left a page behind. lengths: int32 [live], on the device, where the host's are only
        upper bounds. Waits for no device.
        """
        live = len(lengths_host)
        self._host_values[:live] = lengths_host.numpy()
        self._host_values[live:bucket] = 1
        mine = self._inputs[bucket][0]
        if lengths is None:
            # Of memory that is not pinned, the driver has taken a copy when this returns: nothing is to be waited for
            # before the next step writes there, and it costs half of a pinned copy with its event.
            mine.lengths.copy_(mine.lengths_host, non_blocking=True)
        else:
            self.lengths[:live].copy_(lengths)
            self.lengths[live:bucket].fill_(1)
        for group, table, theirs in zip(self.groups, self.tables, block_tables, strict=True):
            pages = table[:live, : theirs.shape[1]]
            if group.spec.sliding_window is None:
                pages.copy_(theirs)
            else:  # engines write -1 where a window has left a page behind, and kernels read every page in range
                torch.where(theirs < 0, self._reserved, theirs, out=pages)
            if live < self._used:  # the rows behind are on the reserved page already
                table[live : self._used].fill_(self.reserved_page)
        self._used = live
        for inputs in self._inputs[bucket]:
            inputs.num_live = live

    def reserve(self, bucket: int, lengths: Sequence[int]) -> None:
        """Rows of these lengths, all of them on the reserved page: no request's cache is touched."""
        values = torch.tensor(lengths, dtype=torch.int32)
        self.lengths_host[:bucket] = values
        self.lengths[:bucket].copy_(values)
        for table in self.tables:
            table.fill_(self.reserved_page)
        self._used = 0
        for inputs in self._inputs[bucket]:
            inputs.num_live = bucket

    def _of(self, bucket: int) -> tuple[StepInputs, ...]:
        host, device = self.lengths_host[:bucket], self.lengths[:bucket]
        return tuple(StepInputs(bucket, host, device, table[:bucket]) for table in self.tables)
