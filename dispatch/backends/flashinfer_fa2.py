"""FlashInfer's FA2 decode over CSR pages, on CUDA cores and on tensor cores: planned on the host before each replay."""

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
from dispatch.backends.page_lists import HostPageLists, PageLists
from dispatch.device import DeviceFingerprint
from dispatch.dtypes import TORCH_DTYPES
from dispatch.spec import AttentionSpec
from dispatch.step import StepInputs

HEAD_DIMS = (64, 128, 256)  # what FlashInfer dispatches over; it has 512 only in some versions
CUDA_CORE_GROUPS = (1, 2, 3, 4, 8)  # instantiated in 0.6.14; 0.7.4 adds 6 and 16
TILE_ROWS = 16  # query heads of one KV head in a tensor-core tile; a larger group takes another, larger tile
MOST_SMS = 192  # above any card so far (188); scratch is sized before the device is known
MOST_BLOCKS_PER_SM = 16  # 2048 threads, in blocks of 128
ALIGNMENT_BYTES = 256  # room for what the scratch's allocator skips


class _Fa2(Backend):
    distribution = "flashinfer-python"
    library = "flashinfer.decode"
    tensor_cores: bool

    def support(self, spec: AttentionSpec, device: DeviceFingerprint) -> Support:
        if device.kind != "cuda":
            return refuse("needs a CUDA device")
        if device.capability < (8, 0):
            return refuse(f"needs SM80, this is {device.sm}")
        if absent := not_installed("flashinfer", self.distribution):
            return refuse(absent)
        if spec.head_dim_qk != spec.head_dim_vo:
            return refuse(f"head dim {spec.head_dim_qk} of K and {spec.head_dim_vo} of V: must be equal")
        if spec.head_dim_qk not in HEAD_DIMS:
            return refuse(f"head dim {spec.head_dim_qk}: 64, 128 or 256")
        if self.tensor_cores and spec.group_size > TILE_ROWS:
            return refuse(f"group size {spec.group_size}: at most {TILE_ROWS}")
        if not self.tensor_cores and spec.group_size not in CUDA_CORE_GROUPS:
            return refuse(f"group size {spec.group_size}: 1, 2, 3, 4 or 8")
        if spec.dtype not in ("bf16", "fp16"):  # the KV cache has the same, or fp8_e4m3: each is served
            return refuse(f"dtype {spec.dtype}: bf16 or fp16")
        if spec.sliding_window is not None and not self.tensor_cores:  # 0 * NaN of an evicted V is NaN
            return refuse("sliding window: this kernel also reads what the window has left behind")
        if spec.has_sinks:  # the wrapper accepts them, and this kernel drops them
            return refuse("sinks: the kernel has none")
        if unaligned := unaligned_strides(spec):
            return refuse(unaligned)
        if spec.kv_strides is not None and max(spec.kv_strides) >= 2**32:
            return refuse(f"KV strides {spec.kv_strides}: must fit into 32 bits")
        return SUPPORTED

    def build(
        self,
        spec: AttentionSpec,
        batch_size: int,
        max_kv: int,
        workspace: torch.Tensor,
        tactic: Mapping[str, int],
    ) -> DecodeImpl:
        return _Planned(spec, batch_size, max_kv, workspace, self.tensor_cores)


class FlashInferFa2(_Fa2):
    """CUDA cores. A chunk planned further past a row's end than a tile (8 tokens) runs for minutes."""

    needs_exact_lengths = True
    family = "flashinfer_fa2"
    tensor_cores = False

    def workspace_bytes(self, spec: AttentionSpec, batch_size: int, max_kv: int) -> int:
        """Partial outputs: rows are split only while all chunks together fit onto the card at once."""
        chunks = MOST_SMS * MOST_BLOCKS_PER_SM // spec.num_kv_heads
        return _partials_bytes(spec, max(chunks, batch_size))


class FlashInferFa2TensorCores(_Fa2):
    """Tensor cores: the prefill kernel with the query heads of a group as its rows. Lengths may be upper bounds."""

    family = "flashinfer_fa2_tc"
    tensor_cores = True

    def workspace_bytes(self, spec: AttentionSpec, batch_size: int, max_kv: int) -> int:
        """Partial outputs of every tile of the captured grid, full or not.

        The grid is two blocks for each SM, or the most tiles that so many rows can make. 512 requests of 32/2 heads
        and d 256 come to 536,346,624 bytes, and as much again / 256 for the softmax sums. (0.7.4 needs less.)
        """
        tiles = -(-batch_size * spec.group_size // TILE_ROWS) + batch_size - 1
        return _partials_bytes(spec, max(2 * MOST_SMS // spec.num_kv_heads, tiles) * TILE_ROWS)


def _partials_bytes(spec: AttentionSpec, rows: int) -> int:
    """A float32 output and a log-sum-exp for each row and query head."""
    return spec.num_qo_heads * rows * (spec.head_dim_vo + 1) * 4 + ALIGNMENT_BYTES


class _Planned(DecodeImpl):
    needs_plan = True
    plan_waits = False  # but for its own last plan: all else is host work, and a copy from pinned memory

    def __init__(
        self, spec: AttentionSpec, batch_size: int, max_kv: int, workspace: torch.Tensor, tensor_cores: bool
    ) -> None:
        max_pages = spec.max_pages(max_kv)
        self.on_device = PageLists(batch_size, max_pages, spec.page_size, workspace.device)
        self.on_host = HostPageLists(batch_size, spec.page_size)
        self.decode = importlib.import_module("flashinfer.decode")
        self.wrapper: Any = self.decode.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            kv_layout=spec.kv_layout,
            use_cuda_graph=True,
            use_tensor_cores=tensor_cores,
            paged_kv_indptr_buffer=self.on_device.indptr,
            paged_kv_indices_buffer=self.on_device.indices,
            paged_kv_last_page_len_buffer=self.on_device.last_page_len,
            backend="fa2",  # "auto" may choose another kernel, and another in another version
        )
        self.constants: dict[str, Any] = {
            "num_qo_heads": spec.num_qo_heads,
            "num_kv_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim_qk,
            "page_size": spec.page_size,
            "window_left": -1 if spec.sliding_window is None else spec.sliding_window - 1,
            "logits_soft_cap": spec.logits_soft_cap,
            "q_data_type": TORCH_DTYPES[spec.dtype],
            "kv_data_type": TORCH_DTYPES[spec.kv_dtype],
            "sm_scale": spec.scale,
        }
        is_fp8 = spec.kv_dtype == "fp8_e4m3"
        self.scales = {"k_scale": spec.k_scale, "v_scale": spec.v_scale} if is_fp8 else {}
        self.planned = False
        is_cuda = workspace.device.type == "cuda"
        self.copied = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]

    def plan(self, inputs: StepInputs) -> None:
        if self.copied is not None:
            self.copied.synchronize()  # the last plan's copy still reads the pinned buffer that this one overwrites
        self.on_host.measure(inputs.lengths_host)
        # `indices`: the wrapper's own, so that nothing is copied over what `begin_step` wrote
        lists = (self.on_host.indptr, self.on_device.indices, self.on_host.last_page_len)
        if self.planned:
            self.decode.fast_decode_plan(self.wrapper, *lists, **self.constants)
        else:  # compiles and loads the kernel, which the fast plan takes for granted
            self.wrapper.plan(*lists, **self.constants)
            self.planned = True
        if self.copied is not None:
            self.copied.record()

    def begin_step(self, inputs: StepInputs) -> None:
        self.on_device.fill(inputs.lengths, inputs.block_table)

    def forward(self, q: torch.Tensor, kv_cache: KVCache, out: torch.Tensor, sinks: torch.Tensor | None = None) -> None:
        self.wrapper.run(q, kv_cache, out=out, **self.scales)
