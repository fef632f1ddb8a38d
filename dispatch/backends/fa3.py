"""FlashAttention-3 over paged KV, with its schedule computed once a step, as serving engines run it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import ClassVar

import torch

from dispatch.backends.base import SUPPORTED, Backend, DecodeImpl, Support, not_installed, refuse
from dispatch.backends.fa3_impl import BalancedFa3Impl, Fa3Impl, Kernel
from dispatch.backends.fa3_layout import SORTED_ROWS, TOKENSPEED, Layout, compares
from dispatch.device import DeviceFingerprint
from dispatch.spec import AttentionSpec

MOST_HEAD_DIM = 256
MOST_SPLITS = 128  # where FA3's own heuristic ends
TILE_TOKENS = 128  # about the tokens of a tile: a row has no more parts than tiles
FEW_SPLITS = 8  # a cheaper sum over the parts of short rows
SMALL_BATCH = 16  # KV heads in a batch, up to which rows are split whatever their lengths


def most_splits(spec: AttentionSpec, units: int, max_kv: int) -> int:
    """Parts in which one row alone fills the card. An upper bound: the schedule splits each row by its length."""
    return max(1, min(MOST_SPLITS, units // spec.num_kv_heads, -(-max_kv // TILE_TOKENS)))


class Fa3(Backend):
    """`splits`: parts of a row at most, without a tactic; None: as many as fill the card. `layout`: of its schedule."""

    splits: ClassVar[int | None] = None
    layout: ClassVar[Layout] = TOKENSPEED
    family = "fa3"
    distribution = "tokenspeed-fa3"
    library = "flash_attn_interface"

    def support(self, spec: AttentionSpec, device: DeviceFingerprint) -> Support:
        if device.kind != "cuda":
            return refuse("needs a CUDA device")
        if device.capability != (9, 0):
            return refuse(f"needs SM90, this is {device.sm}")
        reason = self.absent() or _shape_refused(spec) or self.strides_refused(spec)
        return refuse(reason) if reason else SUPPORTED

    def absent(self) -> str:
        """ "" or why the library is not to be had."""
        return not_installed(self.library, self.distribution)

    def strides_refused(self, spec: AttentionSpec) -> str:
        """ "" or why it does not serve such a KV cache."""
        return "" if spec.kv_strides is None else "KV strides: only a contiguous cache is known to be right"

    def tactics(self, spec: AttentionSpec, device: DeviceFingerprint, batch_size: int, max_kv: int) -> tuple[str, ...]:
        rows = batch_size * spec.num_kv_heads
        few = FEW_SPLITS if rows <= SMALL_BATCH else 1 if rows >= device.units else None
        most = most_splits(spec, device.units, max_kv)
        fewer = ("",) if few is None or few >= most else ("", f"num_splits={few}")
        is_known = batch_size <= SORTED_ROWS and most > 1 and spec.sliding_window is None
        if not is_known or not_installed("triton", "triton"):
            return fewer
        if self.layout.order is not None:
            return (*fewer, "balanced=1") if compares(batch_size, spec.num_kv_heads, device.units) else fewer
        # where rows are taken as they come, their order always matters
        return (*fewer, "balanced=1", "balanced=1,num_splits=1") if few == 1 else (*fewer, "balanced=1")

    def build(
        self,
        spec: AttentionSpec,
        batch_size: int,
        max_kv: int,
        workspace: torch.Tensor,
        tactic: Mapping[str, int],
    ) -> DecodeImpl:
        units = torch.cuda.get_device_properties(workspace.device).multi_processor_count
        most = most_splits(spec, units, max_kv)
        kernel = self.kernel(workspace.device, batch_size)
        if "balanced" in tactic:
            if not compares(batch_size, spec.num_kv_heads, units):
                most = min(most, self.splits or most)  # parts are FA3's own, and take no more memory than the default's
            splits = tactic.get("num_splits", most)
            assert splits > 1 or self.layout.order is None, "not offered"
            return BalancedFa3Impl(kernel, spec, batch_size, splits, workspace.device, units, max_kv, self.layout)
        return Fa3Impl(kernel, spec, batch_size, tactic.get("num_splits", self.splits or most), workspace.device)

    def kernel(self, device: torch.device, batch_size: int) -> Kernel:
        """The library, for a batch size."""
        schedule = importlib.import_module("flash_attn_interface").get_scheduler_metadata
        return schedule, torch.ops.flash_attn_3.fwd  # registered by the import


def _shape_refused(spec: AttentionSpec) -> str:
    """Any page size and group is served; so are strided heads, as HND has them."""
    is_fp8 = spec.kv_dtype == "fp8_e4m3"
    if spec.dtype not in ("bf16", "fp16"):
        return f"dtype {spec.dtype}: bf16 or fp16"
    if is_fp8 and spec.dtype != "bf16":
        return f"dtype {spec.dtype} with KV fp8_e4m3: the output is bf16"
    dim, unit = spec.head_dim_qk, 16 if is_fp8 else 8
    if dim != spec.head_dim_vo:
        return f"head dim {dim} of K and {spec.head_dim_vo} of V: must be equal"
    if dim % unit or dim > MOST_HEAD_DIM:
        return f"head dim {dim}: a multiple of {unit}, up to {MOST_HEAD_DIM}"
    if spec.logits_soft_cap is not None:
        return "soft cap: tokenspeed-fa3 is built without it"
    if spec.has_sinks and (is_fp8 or spec.dtype != "bf16"):
        return "sinks: taken in bf16, and only known to be right for Q and KV in bf16"
    return ""
