"""torch_chunked: decode split over the KV length with an online softmax, in plain torch."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dispatch.backends.base import SUPPORTED, Backend, DecodeImpl, KVCache, Support
from dispatch.backends.paged import gather_heads, visible
from dispatch.device import DeviceFingerprint
from dispatch.spec import AttentionSpec
from dispatch.step import StepInputs

DEFAULT_CHUNK = 256  # tokens; K and V of a chunk of 8 heads, d 128, in float32 are 2 MiB: a core's L2 cache


class TorchChunked(Backend):
    """On a CPU, a chunk is read only for the rows that reach it, so that a ragged batch costs what it holds."""

    family = "torch"
    distribution = "torch"

    def support(self, spec: AttentionSpec, device: DeviceFingerprint) -> Support:
        return SUPPORTED

    def tactics(self, spec: AttentionSpec, device: DeviceFingerprint, batch_size: int, max_kv: int) -> tuple[str, ...]:
        return ("", "chunk=512")

    def build(
        self,
        spec: AttentionSpec,
        batch_size: int,
        max_kv: int,
        workspace: torch.Tensor,
        tactic: Mapping[str, int],
    ) -> DecodeImpl:
        return _Chunked(spec, max_kv, tactic.get("chunk", DEFAULT_CHUNK), workspace.device)


class _Chunked(DecodeImpl):
    def __init__(self, spec: AttentionSpec, max_kv: int, chunk_tokens: int, device: torch.device) -> None:
        self.spec = spec
        self.pages = spec.max_pages(max_kv)
        self.chunk_pages = max(1, chunk_tokens // spec.page_size)
        self.rows: list[torch.Tensor | None] = [None] * -(-self.pages // self.chunk_pages)  # None: every row
        self.needs_plan = device.type == "cpu"

    def plan(self, inputs: StepInputs) -> None:
        """Which rows reach into each chunk; bounds from the host's lengths, which may be too long, never too short."""
        tokens = self.chunk_pages * self.spec.page_size
        ends = inputs.lengths_host
        self.pages = self.spec.max_pages(int(ends.max()))
        chunks = -(-self.pages // self.chunk_pages)
        reaching = [ends > i * tokens for i in range(chunks)]
        self.rows = [None if bool(r.all()) else r.nonzero().flatten() for r in reaching]

    def begin_step(self, inputs: StepInputs) -> None:
        self.inputs = inputs

    def forward(self, q: torch.Tensor, kv_cache: KVCache, out: torch.Tensor, sinks: torch.Tensor | None = None) -> None:
        spec = self.spec
        shape = (q.shape[0], spec.num_kv_heads, spec.group_size)
        grouped = q.view(*shape, spec.head_dim_qk).float() * spec.scale
        peak = grouped.new_full(shape, float("-inf"))  # largest logit so far, its sum of exponentials, its output
        total = grouped.new_zeros(shape)
        if sinks is not None:
            peak = sinks.float().view(1, *shape[1:]).expand(shape).clone()
            total = torch.ones_like(total)
        output = grouped.new_zeros(*shape, spec.head_dim_vo)
        for i, rows in enumerate(self.rows):
            if rows is None:
                self._add_chunk(i, grouped, kv_cache, self.inputs.block_table, self.inputs.lengths, peak, total, output)
                continue
            part = [t[rows] for t in (grouped, self.inputs.block_table, self.inputs.lengths, peak, total, output)]
            self._add_chunk(i, part[0], kv_cache, *part[1:])
            for whole, changed in zip((peak, total, output), part[3:], strict=True):
                whole[rows] = changed
        out.copy_((output / total.clamp_min(torch.finfo(total.dtype).tiny)[..., None]).reshape(out.shape))

    def _add_chunk(
        self,
        i: int,
        q: torch.Tensor,
        kv_cache: KVCache,
        table: torch.Tensor,
        lengths: torch.Tensor,
        peak: torch.Tensor,
        total: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Fold the i-th chunk into the running softmax, in place."""
        spec = self.spec
        columns = table[:, i * self.chunk_pages : min((i + 1) * self.chunk_pages, self.pages)]
        start = i * self.chunk_pages * spec.page_size
        positions = torch.arange(start, start + columns.shape[1] * spec.page_size, device=table.device)
        mask = visible(positions, lengths, spec)
        k = gather_heads(kv_cache[0], columns, lengths, start, spec, torch.float32, spec.k_scale)
        v = gather_heads(kv_cache[1], columns, lengths, start, spec, torch.float32, spec.v_scale)
        logits = torch.matmul(q, k.transpose(2, 3))
        if spec.logits_soft_cap is not None:
            logits = spec.logits_soft_cap * torch.tanh(logits / spec.logits_soft_cap)
        logits.masked_fill_(~mask[:, None, None, :], float("-inf"))
        new_peak = torch.maximum(peak, logits.amax(dim=-1))
        base = new_peak.masked_fill(new_peak == float("-inf"), 0)  # a row with nothing visible yet
        weights = torch.exp(logits - base[..., None])
        decay = torch.exp(peak - base)
        total.mul_(decay).add_(weights.sum(dim=-1))
        output.mul_(decay[..., None]).add_(torch.matmul(weights, v))
        peak.copy_(new_peak)
