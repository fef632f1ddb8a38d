"""cuDNN's paged decode through FlashInfer's prepared graph, which spares the public call's work in every layer."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from dispatch.backends.base import SUPPORTED, Backend, DecodeImpl, KVCache, Support, not_installed, refuse
from dispatch.backends.narrow_table import NarrowTable, narrow_tactics
from dispatch.device import DeviceFingerprint
from dispatch.errors import MeasureError
from dispatch.spec import AttentionSpec
from dispatch.step import StepInputs

FLASHINFER_SINCE = (0, 7, 4)  # the first known to have the prepared graph with these arguments; 0.6.14 has none
CUDNN_SINCE = 91002  # before: no paged heads above 128, no mask for a single query, and two releases with wrong numbers
PAGE_SIZES = (16, 32, 64, 128)
BASE_WORKSPACE_BYTES = 128 << 20  # what FlashInfer recommends for typical loads
WORKSPACE_SPLITS = 4  # more, for large batches: a float32 output and two sums for each of so many parts of every row


class FlashInferCudnn(Backend):
    family = "flashinfer_cudnn"
    distribution = "flashinfer-python"
    library = "flashinfer.cudnn.decode"

    def version(self) -> str:
        """FlashInfer's, the frontend's, and that of cuDNN itself, whose releases differ in speed and in numbers."""
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        return f"{version(self.distribution)}, frontend {version('nvidia-cudnn-frontend')}, cuDNN {cudnn}"

    def support(self, spec: AttentionSpec, device: DeviceFingerprint) -> Support:
        if device.kind != "cuda":
            return refuse("needs a CUDA device")
        if device.capability < (8, 0):
            return refuse(f"needs SM80, this is {device.sm}")
        reason = _library_refused() or _shape_refused(spec, device)
        return refuse(reason) if reason else SUPPORTED

    def tactics(self, spec: AttentionSpec, device: DeviceFingerprint, batch_size: int, max_kv: int) -> tuple[str, ...]:
        return narrow_tactics(spec, batch_size, max_kv)

    def workspace_bytes(self, spec: AttentionSpec, batch_size: int, max_kv: int) -> int:
        """An estimate; the graph says what it needs when it is built, and one that needs more is refused then."""
        part = batch_size * spec.num_qo_heads * (spec.head_dim_vo + 2) * 4
        return BASE_WORKSPACE_BYTES + WORKSPACE_SPLITS * part

    def build(
        self,
        spec: AttentionSpec,
        batch_size: int,
        max_kv: int,
        workspace: torch.Tensor,
        tactic: Mapping[str, int],
    ) -> DecodeImpl:
        return _Cudnn(spec, batch_size, max_kv, workspace)


def _library_refused() -> str:
    """What is missing or too old; found without importing it, and without starting CUDA."""
    if absent := not_installed("flashinfer", "flashinfer-python"):
        return absent
    try:
        installed = version("flashinfer-python")
    except PackageNotFoundError:
        return "FlashInfer of unknown version: pip install flashinfer-python"
    if _numbers(installed) < FLASHINFER_SINCE:
        needed = ".".join(map(str, FLASHINFER_SINCE))
        return f"FlashInfer {installed} is not known to have the prepared cuDNN graph: {needed} or later"
    if absent := not_installed("cudnn", "nvidia-cudnn-frontend"):
        return absent
    try:
        cudnn: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    except RuntimeError as error:  # torch found another cuDNN than it was built for
        return f"cuDNN cannot be used: {error}".splitlines()[0]
    if cudnn is None or cudnn < CUDNN_SINCE:
        return f"cuDNN {cudnn}: {CUDNN_SINCE} (9.10.2) or later"
    return ""


def _shape_refused(spec: AttentionSpec, device: DeviceFingerprint) -> str:
    if spec.dtype not in ("bf16", "fp16"):
        return f"dtype {spec.dtype}: bf16 or fp16"
    if spec.kv_dtype != spec.dtype:
        return f"KV dtype {spec.kv_dtype}: must be that of Q"
    if spec.page_size not in PAGE_SIZES:
        return f"page size {spec.page_size}: 16, 32, 64 or 128"
    dim, most = spec.head_dim_qk, 256 if device.capability >= (9, 0) else 128
    if dim != spec.head_dim_vo:
        return f"head dim {dim} of K and {spec.head_dim_vo} of V: must be equal"
    if dim > most:
        return f"head dim {dim}: at most {most} on {device.sm}"
    if spec.logits_soft_cap is not None:
        return "soft cap: the graph has none"
    if spec.has_sinks:
        return "sinks: cuDNN takes none with a single query"
    if spec.kv_strides is not None:
        return "KV strides: only a contiguous cache is known to be right"
    return ""


def _numbers(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: "0.7.4.post1" is (0, 7, 4)."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(n) for n in found[0].split(".")) if found else ()


class _Cudnn(DecodeImpl):
    """A graph fits one layout of the cache, which is known at the first `forward`: run that before a capture."""

    def __init__(self, spec: AttentionSpec, batch_size: int, max_kv: int, workspace: torch.Tensor) -> None:
        self.prepare: Any = importlib.import_module("flashinfer.cudnn.decode").prepare_cudnn_batch_decode
        self.spec, self.workspace = spec, workspace
        self.narrow = NarrowTable(spec.max_pages(max_kv))
        self.query_lengths = torch.ones(batch_size, 1, 1, 1, dtype=torch.int32, device=workspace.device)
        self.graphs: dict[tuple[Any, ...], Any] = {}

    def begin_step(self, inputs: StepInputs) -> None:
        self.table = self.narrow.read(inputs.block_table)
        self.lengths = inputs.lengths.view(-1, 1, 1, 1)

    def forward(self, q: torch.Tensor, kv_cache: KVCache, out: torch.Tensor, sinks: torch.Tensor | None = None) -> None:
        k, v = kv_cache
        if self.spec.kv_layout == "NHD":  # cuDNN's order of dimensions is HND; it reads any strides
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        layout = (self.table.shape, *((t.shape, t.stride()) for t in (q, k, v, out)))
        if layout not in self.graphs:
            self.graphs[layout] = self._prepared(q, k, v, out)
        self.graphs[layout].run(
            q, k, v, out, None, self.workspace, actual_seq_lens_kv=self.lengths, block_tables=self.table
        )

    def _prepared(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> Any:
        window = self.spec.sliding_window
        prepared = self.prepare(
            q,
            k,
            v,
            self.spec.scale,
            max_sequence_kv=self.table.shape[1] * self.spec.page_size,
            actual_seq_lens_kv=self.lengths,
            block_tables=self.table,
            out=out,
            return_lse=False,
            lse=None,
            q_len_per_req=1,
            window_left=-1 if window is None else window - 1,
            sinks=None,
            actual_seq_lens_q=self.query_lengths,
            is_cuda_graph_compatible=True,
        )
        needed = int(prepared.graph.get_workspace_size())
        if needed > self.workspace.numel():
            raise MeasureError(f"the cuDNN graph needs {needed} bytes of scratch; {self.workspace.numel()} are there")
        return prepared
