"""FlashAttention-3 over paged KV, with its schedule computed once a step, as serving engines run it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from dispatch.backends.base import SUPPORTED, Backend, DecodeImpl, KVCache, Support, not_installed, refuse
from dispatch.backends.fa3_layout import layout_of
from dispatch.backends.fa3_quantise import Quantise
from dispatch.device import DeviceFingerprint
from dispatch.dtypes import TORCH_DTYPES
from dispatch.spec import AttentionSpec
from dispatch.step import StepInputs

Kernel = tuple[Callable[..., Any], Callable[..., Any]]
"""FA3's get_scheduler_metadata, and what attends, with the arguments that they have in flash_attn_interface."""

MOST_HEAD_DIM = 256
MOST_SPLITS = 128  # where FA3's own heuristic ends
TILE_TOKENS = 128  # about the tokens of a tile: a row has no more parts than tiles
FEW_SPLITS = 8  # a cheaper sum over the parts of short rows
SMALL_BATCH = 16  # KV heads in a batch, up to which rows are split whatever their lengths
BALANCED_WAVES = 3  # of tiles that are not split, above which it matters little how they are
BALANCED_ROWS = 128  # above so many, finding the schedule takes longer than it saves


def most_splits(spec: AttentionSpec, units: int, max_kv: int) -> int:
    """Parts in which one row alone fills the card. An upper bound: the schedule splits each row by its length."""
    return max(1, min(MOST_SPLITS, units // spec.num_kv_heads, -(-max_kv // TILE_TOKENS)))


class Fa3(Backend):
    """`splits`: parts of a row at most, without a tactic; None: as many as fill the card."""

    splits: ClassVar[int | None] = None
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
        is_few = batch_size <= BALANCED_ROWS and rows <= BALANCED_WAVES * device.units
        is_balanced = is_few and most > 1 and spec.sliding_window is None
        return (*fewer, "balanced=1") if is_balanced and not not_installed("triton", "triton") else fewer

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
            return _Balanced(kernel, spec, batch_size, most, workspace.device, units, max_kv)
        return _Fa3(kernel, spec, batch_size, tactic.get("num_splits", self.splits or most), workspace.device)

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


class _Fa3(DecodeImpl):
    """Calls the operator below `flash_attn_with_kvcache`, which takes no output and would cost a copy of it."""

    def __init__(
        self, kernel: Kernel, spec: AttentionSpec, batch_size: int, num_splits: int, device: torch.device
    ) -> None:
        self.schedule, self.attend = kernel
        self.spec, self.num_splits = spec, num_splits
        window = spec.sliding_window
        self.window = (-1, -1) if window is None else (window - 1, 0)
        self.metadata: torch.Tensor | None = None
        self.quantise: Quantise | None = None
        self.descales: dict[str, torch.Tensor] = {}
        if spec.kv_dtype == "fp8_e4m3":
            shape = (batch_size, spec.num_kv_heads)
            self.quantise = Quantise((batch_size, spec.num_qo_heads, spec.head_dim_qk), device)
            self.descales = {
                "q_descale": torch.ones(shape, device=device),
                "k_descale": torch.full(shape, spec.k_scale, device=device),
                "v_descale": torch.full(shape, spec.v_scale, device=device),
            }

    def begin_step(self, inputs: StepInputs) -> None:
        self._take(inputs)
        metadata = self._scheduled(self.lengths, self.max_seqlen_k)
        if self.metadata is None:  # its size depends on the library's version
            self.metadata = torch.empty_like(metadata)
        self.metadata.copy_(metadata)

    def _take(self, inputs: StepInputs) -> None:
        self.lengths, self.table = inputs.lengths, inputs.block_table
        # the longest row that the table can hold is what the kernel takes from it; the schedule must assume the same
        self.max_seqlen_k = inputs.block_table.shape[1] * self.spec.page_size

    def _scheduled(self, lengths: torch.Tensor, max_kv: int) -> torch.Tensor:
        """FA3's own schedule of rows of these lengths, int32 on the device: its metadata."""
        spec = self.spec
        metadata: torch.Tensor = self.schedule(
            len(lengths),
            1,
            max_kv,
            spec.num_qo_heads,
            spec.num_kv_heads,
            spec.head_dim_qk,
            lengths,
            qkv_dtype=TORCH_DTYPES[spec.kv_dtype],
            page_size=spec.page_size,
            causal=True,
            window_size=self.window,
            num_splits=self.num_splits,
        )
        return metadata

    def forward(self, q: torch.Tensor, kv_cache: KVCache, out: torch.Tensor, sinks: torch.Tensor | None = None) -> None:
        spec = self.spec
        k, v = kv_cache
        if spec.kv_layout == "HND":
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        optional = dict(self.descales)
        if sinks is not None:
            optional["sinks"] = sinks.to(torch.bfloat16)
        self.attend(
            (q if self.quantise is None else self.quantise(q)).unsqueeze(1),
            k,
            v,
            out=out.unsqueeze(1),
            seqused_k=self.lengths,
            max_seqlen_k=self.max_seqlen_k,
            page_table=self.table,
            softmax_scale=spec.scale,
            is_causal=True,
            window_size_left=self.window[0],
            window_size_right=self.window[1],
            scheduler_metadata=self.metadata,
            num_splits=self.num_splits,
            **optional,
        )


class _Balanced(_Fa3):
    """The same kernel, with a schedule of our own in the place of FA3's: see fa3_balance."""

    def __init__(
        self,
        kernel: Kernel,
        spec: AttentionSpec,
        batch_size: int,
        num_splits: int,
        device: torch.device,
        units: int,
        max_kv: int,
    ) -> None:
        super().__init__(kernel, spec, batch_size, num_splits, device)
        balance: Any = importlib.import_module("dispatch.backends.fa3_balance")  # imports triton
        heads = spec.num_kv_heads
        own = lambda lengths: self._scheduled(lengths.to(device), max_kv).cpu()  # noqa: E731
        layout = layout_of(own, heads, units, num_splits)
        self.metadata = self._scheduled(torch.ones(batch_size, dtype=torch.int32, device=device), max_kv)
        self.balanced = balance.BalancedSchedule(batch_size, heads, units, num_splits, max_kv, layout, self.metadata)

    def begin_step(self, inputs: StepInputs) -> None:
        self._take(inputs)
        self.balanced.write(self.lengths)
