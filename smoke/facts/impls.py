"""Kernels as nobody should run them, to measure what their strongest form saves; and two detours of FlashInfer's."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from dispatch.backends import DecodeImpl, KVCache
from dispatch.backends.page_lists import PageLists
from dispatch.dtypes import TORCH_DTYPES
from dispatch.spec import AttentionSpec
from dispatch.step import StepInputs


class Fa3MetadataEachLayer(DecodeImpl):
    """FA3 without scheduler metadata: every call computes it again."""

    def __init__(self, fa3: Any) -> None:
        if not hasattr(fa3, "metadata"):
            raise AttributeError("the FA3 backend no longer keeps its metadata under this name")
        self.fa3 = fa3

    def begin_step(self, inputs: StepInputs) -> None:
        self.fa3.begin_step(inputs)

    def forward(self, q: torch.Tensor, kv_cache: KVCache, out: torch.Tensor, sinks: torch.Tensor | None = None) -> None:
        self.fa3.metadata = None
        self.fa3.forward(q, kv_cache, out, sinks)


class CudnnPublicCall(DecodeImpl):
    """cuDNN through FlashInfer's public function."""

    def __init__(self, spec: AttentionSpec, workspace: torch.Tensor) -> None:
        self.attend: Any = importlib.import_module("flashinfer.cudnn.decode").cudnn_batch_decode_with_kv_cache
        self.spec, self.workspace = spec, workspace

    def begin_step(self, inputs: StepInputs) -> None:
        self.table, self.lengths = inputs.block_table, inputs.lengths.view(-1, 1, 1, 1)

    def forward(self, q: torch.Tensor, kv_cache: KVCache, out: torch.Tensor, sinks: torch.Tensor | None = None) -> None:
        k, v = kv_cache  # NHD; cuDNN's order is HND, with any strides
        self.attend(
            q,
            k.transpose(1, 2),
            v.transpose(1, 2),
            self.spec.scale,
            self.workspace,
            max_sequence_kv=self.table.shape[1] * self.spec.page_size,
            actual_seq_lens_kv=self.lengths,
            block_tables=self.table,
            is_cuda_graph_compatible=True,
            out=out,
        )


class FlashInferFa3(DecodeImpl):
    """FlashInfer's decode wrapper with its explicit FA3, planned in full before each replay."""

    needs_plan = True

    def __init__(self, spec: AttentionSpec, batch_size: int, max_kv: int, workspace: torch.Tensor) -> None:
        pages = spec.max_pages(max_kv)
        self.on_device = PageLists(batch_size, pages, spec.page_size, workspace.device)
        self.on_host = PageLists(batch_size, 0, spec.page_size, torch.device("cpu"))
        self.wrapper: Any = importlib.import_module("flashinfer.decode").BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            kv_layout=spec.kv_layout,
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=self.on_device.indptr,
            paged_kv_indices_buffer=self.on_device.indices,
            paged_kv_last_page_len_buffer=self.on_device.last_page_len,
            backend="fa3",
        )
        self.sizes = (spec.num_qo_heads, spec.num_kv_heads, spec.head_dim_qk, spec.page_size)
        self.constants = {
            "q_data_type": TORCH_DTYPES[spec.dtype],
            "kv_data_type": TORCH_DTYPES[spec.kv_dtype],
            "sm_scale": spec.scale,
        }

    def plan(self, inputs: StepInputs) -> None:
        torch.cuda.synchronize()  # the last plan's copy reads the pinned buffer that this one overwrites
        self.on_host.measure(inputs.lengths_host)
        lists = (self.on_host.indptr, self.on_device.indices, self.on_host.last_page_len)
        self.wrapper.plan(*lists, *self.sizes, **self.constants)

    def begin_step(self, inputs: StepInputs) -> None:
        self.on_device.fill(inputs.lengths, inputs.block_table)

    def forward(self, q: torch.Tensor, kv_cache: KVCache, out: torch.Tensor, sinks: torch.Tensor | None = None) -> None:
        self.wrapper.run(q, kv_cache, out=out)


@contextmanager
def xqa_general_kernel() -> Iterator[None]:
    """XQA's general kernel over fp8 pages in place of the one for SM90: what is captured inside.

    By the module's own name: the package has a function of the same name in the module's place.
    """
    module = importlib.import_module("flashinfer.xqa")
    with mock.patch.object(module, "get_compute_capability", lambda device: (10, 0)):
        yield
