"""flashinfer_trtllm_gen: the prebuilt decode kernels for SM100 and SM103, through FlashInfer. Not yet run on one."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

import torch

from dispatch.backends.base import SUPPORTED, Backend, DecodeImpl, KVCache, Support, not_installed, refuse
from dispatch.device import DeviceFingerprint
from dispatch.spec import AttentionSpec
from dispatch.step import StepInputs

HEAD_DIMS = (64, 128)
PAGE_SIZES = (16, 32, 64)
MOST_GROUP = 16
WORKSPACE_BYTES = 512 << 20  # partial outputs and counters; engines that reserved 394 MiB ran out at 512 requests


class FlashInferTrtllmGen(Backend):
    """Only what needs no special case is served, until a card is there to try the rest on."""

    family = "flashinfer_trtllm_gen"  # its counters must be zero at first use and are left at zero
    distribution = "flashinfer-python"
    library = "flashinfer.decode"

    def support(self, spec: AttentionSpec, device: DeviceFingerprint) -> Support:
        if device.kind != "cuda":
            return refuse("needs a CUDA device")
        if device.capability < (10, 0):
            return refuse(f"needs SM100, this is {device.sm}")
        if device.capability not in ((10, 0), (10, 3)):
            return refuse(f"needs SM100 or SM103, this is {device.sm}")
        if absent := not_installed("flashinfer", self.distribution):
            return refuse(absent)
        if spec.head_dim_qk != spec.head_dim_vo:
            return refuse(f"head dim {spec.head_dim_qk} of K and {spec.head_dim_vo} of V: must be equal")
        if spec.head_dim_qk not in HEAD_DIMS:
            return refuse(f"head dim {spec.head_dim_qk}: 64 or 128")
        if spec.group_size > MOST_GROUP:
            return refuse(f"group size {spec.group_size}: at most {MOST_GROUP}")
        if spec.page_size not in PAGE_SIZES:
            return refuse(f"page size {spec.page_size}: 16, 32 or 64")
        if spec.dtype not in ("bf16", "fp16"):
            return refuse(f"dtype {spec.dtype}: bf16 or fp16")
        if spec.kv_dtype != spec.dtype:
            return refuse(f"{spec.dtype} Q with {spec.kv_dtype} KV: must be equal")
        if spec.logits_soft_cap is not None:
            return refuse("soft cap: the kernel has none")
        if spec.has_sinks:
            return refuse("sinks: not tried yet")
        if spec.kv_strides is not None:
            return refuse(f"KV strides {spec.kv_strides}: only a contiguous cache so far")
        return SUPPORTED

    def workspace_bytes(self, spec: AttentionSpec, batch_size: int, max_kv: int) -> int:
        return WORKSPACE_BYTES

    def build(
        self,
        spec: AttentionSpec,
        batch_size: int,
        max_kv: int,
        workspace: torch.Tensor,
        tactic: Mapping[str, int],
    ) -> DecodeImpl:
        return _TrtllmGen(spec, max_kv, workspace)


class _TrtllmGen(DecodeImpl):
    def __init__(self, spec: AttentionSpec, max_kv: int, workspace: torch.Tensor) -> None:
        self.spec, self.max_kv, self.workspace = spec, max_kv, workspace
        self.decode = importlib.import_module("flashinfer.decode")
        self.window_left = -1 if spec.sliding_window is None else spec.sliding_window - 1

    def begin_step(self, inputs: StepInputs) -> None:
        self.inputs = inputs

    def forward(self, q: torch.Tensor, kv_cache: KVCache, out: torch.Tensor, sinks: torch.Tensor | None = None) -> None:
        self.decode.trtllm_batch_decode_with_kv_cache(
            q,
            kv_cache,
            self.workspace,
            self.inputs.block_table,
            self.inputs.lengths,
            self.max_kv,
            bmm1_scale=self.spec.scale,
            window_left=self.window_left,
            out=out,
            kv_layout=self.spec.kv_layout,
            backend="trtllm-gen",
        )
