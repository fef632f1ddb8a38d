"""torch_sdpa: gather the pages, then torch's scaled_dot_product_attention."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn.functional import scaled_dot_product_attention

from dispatch.backends.base import SUPPORTED, Backend, DecodeImpl, KVCache, Support, refuse
from dispatch.backends.paged import gather_heads, visible
from dispatch.device import DeviceFingerprint
from dispatch.dtypes import TORCH_DTYPES
from dispatch.spec import AttentionSpec
from dispatch.step import StepInputs


class TorchSdpa(Backend):
    """Reads every row as far as the longest one."""

    family = "torch"
    distribution = "torch"

    def support(self, spec: AttentionSpec, device: DeviceFingerprint) -> Support:
        if spec.logits_soft_cap is not None:
            return refuse("logits soft cap: scaled_dot_product_attention has none")
        if spec.has_sinks:
            return refuse("attention sinks: scaled_dot_product_attention has none")
        return SUPPORTED

    def build(
        self,
        spec: AttentionSpec,
        batch_size: int,
        max_kv: int,
        workspace: torch.Tensor,
        tactic: Mapping[str, int],
    ) -> DecodeImpl:
        return _Sdpa(spec, max_kv, workspace.device)


class _Sdpa(DecodeImpl):
    def __init__(self, spec: AttentionSpec, max_kv: int, device: torch.device) -> None:
        self.spec = spec
        self.pages = spec.max_pages(max_kv)  # a CUDA graph's shapes are fixed: always the longest
        self.needs_plan = device.type == "cpu"
        self.dtype = TORCH_DTYPES[spec.dtype]

    def plan(self, inputs: StepInputs) -> None:
        self.pages = self.spec.max_pages(int(inputs.lengths_host.max()))

    def begin_step(self, inputs: StepInputs) -> None:
        tokens = self.pages * self.spec.page_size
        self.table, self.lengths = inputs.block_table[:, : self.pages], inputs.lengths
        self.mask = visible(torch.arange(tokens, device=inputs.lengths.device), inputs.lengths, self.spec)

    def forward(self, q: torch.Tensor, kv_cache: KVCache, out: torch.Tensor, sinks: torch.Tensor | None = None) -> None:
        spec = self.spec
        k = gather_heads(kv_cache[0], self.table, self.lengths, 0, spec, self.dtype, spec.k_scale)
        v = gather_heads(kv_cache[1], self.table, self.lengths, 0, spec, self.dtype, spec.v_scale)
        grouped = q.view(q.shape[0], spec.num_kv_heads, spec.group_size, spec.head_dim_qk)
        mask = self.mask[:, None, None, :]
        attended = scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=spec.scale)
        out.copy_(attended.reshape(out.shape))
