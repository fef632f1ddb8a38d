"""Steps above the largest bucket: eagerly, with the default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dispatch.engine.buffers import StepBuffers
from dispatch.engine.builder import Builder, BuiltStep
from dispatch.engine.output import rows
from dispatch.engine.variants import Variant


class AboveBuckets:
    """Buffers and scratch of its own, for the next power of two of rows; kept while steps are of that size."""

    def __init__(self, builder: Builder, defaults: Variant, reserved_page: int) -> None:
        """`builder`: as the buckets were built; its scratch is not used."""
        self.builder, self.defaults, self.reserved_page = builder, defaults, reserved_page
        self._built: tuple[StepBuffers, BuiltStep] | None = None

    def run(
        self, lengths_host: torch.Tensor, block_tables: Sequence[torch.Tensor], lengths: torch.Tensor | None
    ) -> Any:
        """As DecodeGraphRunner.run."""
        buffers, built = self._for(1 << (len(lengths_host) - 1).bit_length())
        buffers.refresh(built.bucket, lengths_host, block_tables, lengths)
        built.plan()
        return rows(built.work(), len(lengths_host))

    def _for(self, size: int) -> tuple[StepBuffers, BuiltStep]:
        if self._built is None or self._built[1].bucket != size:
            kept, device = self.builder, self.builder.device
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # what is replaced may still be read
            buffers = StepBuffers(kept.groups, (size,), kept.max_seq_len, self.reserved_page, device)
            builder = Builder(kept.step, kept.groups, kept.max_seq_len, kept.backends, device)
            builder.reserve([(size, self.defaults)])
            self._built = buffers, builder.build(size, self.defaults, buffers.inputs(size))
        return self._built
