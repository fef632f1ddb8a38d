"""An engine without this project's runner: one implementation, every step eager. What "as before" means."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dispatch.backends import DecodeImpl, registry
from dispatch.backends.base import KVCache
from dispatch.candidate import Candidate
from dispatch.step import StepInputs
from smoke.model import Decoder
from smoke.pages import RESERVED_PAGE
from smoke.sizes import BUCKETS, MAX_SEQ_LEN


class DirectRunner:
    """Pads to the buckets as an engine with CUDA graphs would, and computes with the named backend alone."""

    def __init__(self, decoder: Decoder, backend: str, buckets: Sequence[int] = BUCKETS) -> None:
        self.decoder, self.buckets = decoder, buckets
        candidate, spec = Candidate.parse(backend), decoder.cache.spec
        served = registry.get(candidate.backend)
        size = served.workspace_bytes(spec, buckets[-1], MAX_SEQ_LEN)
        self.scratch = torch.zeros(size, dtype=torch.uint8, device=decoder.cache.device)
        self.impls: dict[int, DecodeImpl] = {
            bucket: served.build(spec, bucket, MAX_SEQ_LEN, self.scratch, candidate.knobs) for bucket in buckets
        }

    def run(self, lengths_host: torch.Tensor, block_tables: Sequence[torch.Tensor]) -> torch.Tensor:
        """Logits of the live rows."""
        live = len(lengths_host)
        bucket = next(b for b in self.buckets if b >= live)
        impl, inputs = self.impls[bucket], self._padded(bucket, lengths_host, block_tables[0])

        def attend(layer: int, q: torch.Tensor, kv_cache: KVCache, out: torch.Tensor) -> None:
            impl.forward(q, kv_cache, out)

        if impl.needs_plan:
            impl.plan(inputs)
        impl.begin_step(inputs)
        return self.decoder.step((inputs,), attend)[:live]

    def _padded(self, bucket: int, lengths_host: torch.Tensor, table: torch.Tensor) -> StepInputs:
        live, device = len(lengths_host), self.decoder.cache.device
        host = torch.ones(bucket, dtype=torch.int32, pin_memory=device.type == "cuda")
        host[:live] = lengths_host
        width = self.decoder.cache.spec.max_pages(MAX_SEQ_LEN)
        pages = torch.full((bucket, width), RESERVED_PAGE, dtype=torch.int32, device=device)
        pages[:live, : table.shape[1]] = table
        return StepInputs(live, host, host.to(device), pages)
