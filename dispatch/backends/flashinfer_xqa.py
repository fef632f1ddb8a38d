"""FlashInfer's XQA decode: CTAs of a row meet at semaphores, and split it by the width of its page table."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch

from dispatch.backends.base import (
    SUPPORTED,
    Backend,
    DecodeImpl,
    KVCache,
    Support,
    not_installed,
    refuse,
    unaligned_strides,
)
from dispatch.backends.narrow_table import NarrowTable, narrow_tactics
from dispatch.device import DeviceFingerprint
from dispatch.errors import MeasureError
from dispatch.spec import AttentionSpec
from dispatch.step import StepInputs

MAJOR_CAPABILITIES = (9, 10, 12)
PAGE_SIZES = (16, 32, 64, 128)
# 16-bit kernels pad a head to 64, 128 or 256 elements, and those of SM90 by less than one part of 64.
UNPADDABLE_HEAD_DIMS = (144, 160, 176)
MOST_HEAD_DIM = 256
MOST_GROUP = 16  # rows of a tensor-core tile; larger groups keep Q in more shared memory than is sure to be there

# One uint32 a row and KV head. The same for every bucket, so that no bucket's scratch lies on another's semaphores,
# which every kernel finds and leaves at zero.
SEMAPHORE_BYTES = 8 << 20
# Rows are split only while all their parts together find an SM each: more than any card has.
MOST_PARTS = 512


class FlashInferXqa(Backend):
    family = "flashinfer_xqa"
    distribution = "flashinfer-python"
    library = "flashinfer.xqa"

    def support(self, spec: AttentionSpec, device: DeviceFingerprint) -> Support:
        if device.kind != "cuda":
            return refuse("needs a CUDA device")
        if device.capability[0] not in MAJOR_CAPABILITIES:
            return refuse(f"needs SM90, SM10x or SM12x, this is {device.sm}")
        reason = not_installed("flashinfer", self.distribution) or _shape_refused(spec)
        return refuse(reason) if reason else SUPPORTED

    def tactics(self, spec: AttentionSpec, device: DeviceFingerprint, batch_size: int, max_kv: int) -> tuple[str, ...]:
        return narrow_tactics(spec, batch_size, max_kv)

    def workspace_bytes(self, spec: AttentionSpec, batch_size: int, max_kv: int) -> int:
        """Semaphores, and for each query head of a part an output in 16 bits and two float32; with room to align."""
        return SEMAPHORE_BYTES + MOST_PARTS * MOST_GROUP * (2 * MOST_HEAD_DIM + 16)

    def build(
        self,
        spec: AttentionSpec,
        batch_size: int,
        max_kv: int,
        workspace: torch.Tensor,
        tactic: Mapping[str, int],
    ) -> DecodeImpl:
        if batch_size * spec.num_kv_heads * 4 > SEMAPHORE_BYTES:
            raise MeasureError(f"batch size {batch_size}: the semaphores hold {SEMAPHORE_BYTES // 4} KV heads")
        return _Xqa(spec, max_kv, workspace)


def _shape_refused(spec: AttentionSpec) -> str:
    if spec.dtype not in ("bf16", "fp16"):  # the KV cache has the same, or fp8_e4m3: each is served
        return f"dtype {spec.dtype}: bf16 or fp16"
    if spec.page_size not in PAGE_SIZES:
        return f"page size {spec.page_size}: 16, 32, 64 or 128"
    dim = spec.head_dim_qk
    if dim != spec.head_dim_vo:
        return f"head dim {dim} of K and {spec.head_dim_vo} of V: must be equal"
    if dim % 16 or dim > MOST_HEAD_DIM:
        return f"head dim {dim}: a multiple of 16, up to {MOST_HEAD_DIM}"
    if dim in UNPADDABLE_HEAD_DIMS and spec.kv_dtype != "fp8_e4m3":
        return f"head dim {dim}: up to 128, or 192 and more"
    if spec.group_size > MOST_GROUP:
        return f"group size {spec.group_size}: at most {MOST_GROUP}"
    if spec.logits_soft_cap is not None:
        return "soft cap: the kernel has none"
    return unaligned_strides(spec)


class _Xqa(DecodeImpl):
    def __init__(self, spec: AttentionSpec, max_kv: int, workspace: torch.Tensor) -> None:
        self.run: Any = importlib.import_module("flashinfer.xqa").xqa
        self.spec = spec
        self.semaphores, self.scratch = workspace[:SEMAPHORE_BYTES], workspace[SEMAPHORE_BYTES:]
        self.narrow = NarrowTable(spec.max_pages(max_kv))
        # The kernel scales logits by q_scale * kv_scale / sqrt(d), and the output by kv_scale. It ignores kv_scale
        # where the cache is not fp8.
        is_fp8 = spec.kv_dtype == "fp8_e4m3"
        self.kv_scale = spec.v_scale if is_fp8 else 1.0
        logit_scale = spec.scale * (spec.k_scale if is_fp8 else 1.0)
        self.q_scale = logit_scale * float(spec.head_dim_qk) ** 0.5 / self.kv_scale

    def begin_step(self, inputs: StepInputs) -> None:
        self.table = self.narrow.read(inputs.block_table)
        self.lengths = inputs.lengths.view(torch.uint32).unsqueeze(1)

    def forward(self, q: torch.Tensor, kv_cache: KVCache, out: torch.Tensor, sinks: torch.Tensor | None = None) -> None:
        if not out.is_contiguous():
            raise MeasureError("out must be contiguous: the kernel knows no other")
        spec = self.spec
        self.run(
            q.contiguous().unsqueeze(1),
            kv_cache[0],
            kv_cache[1],
            self.table,
            self.lengths,
            out.unsqueeze(1),
            self.scratch,
            self.semaphores,
            spec.num_kv_heads,
            spec.page_size,
            sinks=None if sinks is None else sinks.view(spec.num_kv_heads, spec.group_size),
            q_scale=self.q_scale,
            kv_scale=self.kv_scale,
            sliding_win_size=spec.sliding_window or 0,
            kv_layout=spec.kv_layout,
        )
