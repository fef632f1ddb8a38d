"""What FA3 does for a bucket: the two calls of a step, and the same with a schedule of our own."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from dispatch.backends.base import DecodeImpl, KVCache
from dispatch.backends.fa3_layout import Layout, block_tokens
from dispatch.backends.fa3_quantise import Quantise
from dispatch.dtypes import TORCH_DTYPES
from dispatch.spec import AttentionSpec
from dispatch.step import StepInputs

Kernel = tuple[Callable[..., Any], Callable[..., Any]]
"""FA3's get_scheduler_metadata, and what attends, with the arguments that they have in flash_attn_interface."""

ENOUGH_SPLITS = 16  # to tell from the parts of rows how long blocks are


class Fa3Impl(DecodeImpl):
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
        self.given: dict[str, torch.Tensor] = {}  # arguments of the kernel that not every layer has
        if spec.kv_dtype == "fp8_e4m3":
            shape = (batch_size, spec.num_kv_heads)
            self.quantise = Quantise((batch_size, spec.num_qo_heads, spec.head_dim_qk), device)
            self.given |= {
                "q_descale": torch.ones(shape, device=device),
                "k_descale": torch.full(shape, spec.k_scale, device=device),
                "v_descale": torch.full(shape, spec.v_scale, device=device),
            }

    def begin_step(self, inputs: StepInputs) -> None:
        self._take(inputs)
        metadata = self._scheduled(self.lengths, self.max_seqlen_k, self.num_splits)
        if self.metadata is None:  # its size depends on the library's version
            self.metadata = torch.empty_like(metadata)
        self.metadata.copy_(metadata)

    def _take(self, inputs: StepInputs) -> None:
        self.lengths, self.table = inputs.lengths, inputs.block_table
        # the longest row that the table can hold is what the kernel takes from it; the schedule must assume the same
        self.max_seqlen_k = inputs.block_table.shape[1] * self.spec.page_size

    def _scheduled(self, lengths: torch.Tensor, max_kv: int, num_splits: int) -> torch.Tensor:
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
            num_splits=num_splits,
        )
        return metadata

    def forward(self, q: torch.Tensor, kv_cache: KVCache, out: torch.Tensor, sinks: torch.Tensor | None = None) -> None:
        spec = self.spec
        k, v = kv_cache
        if spec.kv_layout == "HND":
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        given = self.given if sinks is None else {**self.given, "sinks": sinks.to(torch.bfloat16)}
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
            **given,
        )


class BalancedFa3Impl(Fa3Impl):
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
        layout: Layout,
    ) -> None:
        super().__init__(kernel, spec, batch_size, num_splits, device)
        balance: Any = importlib.import_module("dispatch.backends.fa3_balance")  # imports triton
        heads = spec.num_kv_heads
        tokens = 1  # where no row is split, the order alone matters
        if num_splits > 1:
            probed = max(num_splits, ENOUGH_SPLITS)
            own = lambda lengths: self._scheduled(lengths.to(device), max_kv, probed).cpu()  # noqa: E731
            tokens = block_tokens(own, heads, units, probed, layout)
        self.metadata = self._scheduled(torch.ones(batch_size, dtype=torch.int32, device=device), max_kv, num_splits)
        sizes = (batch_size, heads, units, num_splits, max_kv, tokens)
        self.balanced = balance.BalancedSchedule(*sizes, layout, self.metadata)
        self.takes_as_they_come = layout.order is None
        if self.takes_as_they_come:
            self.given["row_starts"] = self.balanced.row_starts

    def begin_step(self, inputs: StepInputs) -> None:
        self._take(inputs)
        self.balanced.write(self.lengths)
        if self.takes_as_they_come:
            self.lengths = self.balanced.lengths
