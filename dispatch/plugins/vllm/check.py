"""A kernel over vLLM's own cache, before graphs are captured: on the block that no request is given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from dispatch.dtypes import TORCH_DTYPES
from dispatch.gate_checks import compare
from dispatch.plugins.vllm.decode import DecodeStep, kv_pages
from dispatch.reference import reference_decode

NULL_BLOCK = 0  # vLLM's, at which padding and unused entries of a block table point
LENGTHS = (1, 777, 5, 1500, 16, 260, 2, 1029)  # of rows, in no order, some of them split


def difference(step: DecodeStep, layer: Any, max_kv: int) -> str:
    """ "" or how far it is off the float32 reference, in rows of several lengths, whose pages are all the block that no
    request is given.

    That kernels find their pages was the gate's to check, on pages of its own; here it is that they read vLLM's as the
    spec says. The block is zeroed behind it, as vLLM allocates it. Raises what the kernel raises.
    """
    spec, bucket, cache = step.spec, len(step.lengths_host), layer.kv_cache
    random = torch.Generator(cache.device).manual_seed(bucket)
    pages = kv_pages(cache, spec)
    try:
        for its in pages:
            its[NULL_BLOCK].copy_(torch.randn(its[NULL_BLOCK].shape, generator=random, device=cache.device))
        lengths = torch.tensor(LENGTHS, dtype=torch.int32).clamp(max=max_kv)[torch.arange(bucket) % len(LENGTHS)]
        table = torch.full((bucket, spec.max_pages(max_kv)), NULL_BLOCK, dtype=torch.int32, device=cache.device)
        step.prepare(SimpleNamespace(seq_lens=lengths.to(cache.device), block_table_tensor=table), lengths.numpy())
        shape = (bucket, spec.num_qo_heads, spec.head_dim_qk)
        q = torch.randn(shape, generator=random, device=cache.device).to(TORCH_DTYPES[spec.dtype])
        out = torch.full_like(q, float("nan"))
        step.attend(q, cache, out)
        assert step.inputs is not None
        expected = reference_decode(spec, q, pages, step.inputs, None)
        return compare(spec, out[None], expected, step.inputs).worst()
    finally:
        step.inputs = None
        for its in pages:
            its[NULL_BLOCK].zero_()
