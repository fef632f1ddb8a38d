"""Every backend on a GPU at a model's sizes: captured with the longest row, then through the gate's lengths.

Compiles kernels where the machine has none yet, which takes minutes. A backend that does not serve a layer is skipped
with its reason.
"""

from __future__ import annotations

import pytest
import torch

from dispatch.backends import registry
from dispatch.bench.cuda_timer import CudaTimer
from dispatch.bench.pool import PagedPool
from dispatch.bench.timer import CpuTimer
from dispatch.candidate import Candidate
from dispatch.device import current_device
from dispatch.gate import Gate
from dispatch.gate_inputs import gate_pages
from dispatch.workspace import Workspaces
from tests.fakes import spec_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MAX_KV = 4096
BUCKETS = (1, 8, 64)
LAYERS = {
    "bf16": {},
    "8/1 heads": {"num_qo_heads": 8, "num_kv_heads": 1},
    "fp16, page 64": {"dtype": "fp16", "kv_dtype": "fp16", "page_size": 64, "num_qo_heads": 64},
    "fp8 KV, page 64": {"kv_dtype": "fp8_e4m3", "page_size": 64, "k_scale": 0.25, "v_scale": 0.5},
    "fp8 KV, fp16 Q": {"kv_dtype": "fp8_e4m3", "dtype": "fp16"},
    "window": {"sliding_window": 500},
    "HND": {"kv_layout": "HND"},
    "soft cap": {"logits_soft_cap": 30.0},
    "sinks": {"has_sinks": True},
    **{f"group {group}": {"num_qo_heads": 2 * group, "num_kv_heads": 2} for group in (*range(1, 9), 16)},
    **{f"d {d}": {"head_dim_qk": d, "head_dim_vo": d} for d in (64, 80, 96, 192, 256)},
    **{f"page {page}": {"page_size": page} for page in (1, 8, 32, 64, 128)},
}
# XQA lets NaN through from behind a row's end over an fp8 cache: smoke/results/h200/README.md
FINITE_KV = {("fp8 KV, page 64", "flashinfer_xqa"), ("fp8 KV, fp16 Q", "flashinfer_xqa")}


def layer(name):
    sizes = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim_qk": 128, "head_dim_vo": 128, "page_size": 16}
    return spec_of(**{**sizes, "dtype": "bf16", "kv_dtype": "bf16", "num_layers": 36, **LAYERS[name]})


@pytest.mark.parametrize("backend", [name for name in registry.names() if not name.startswith("torch_")])
@pytest.mark.parametrize("name", LAYERS)
def test_what_is_eligible_is_right(name, backend):
    spec, device, kernel = layer(name), torch.device("cuda"), current_device()
    support = registry.support(backend, spec, kernel)
    if not support.ok:
        pytest.skip(support.reason)
    served, scratch = registry.get(backend), Workspaces(device)
    scratch.reserve(served.family, max(served.workspace_bytes(spec, bucket, MAX_KV) for bucket in BUCKETS))
    wrong = {}
    for bucket in BUCKETS:
        pool = PagedPool(spec, gate_pages(spec, bucket, MAX_KV), 3, device)
        inputs, chain, timer = pool.inputs(bucket, MAX_KV), pool.chain(bucket), CudaTimer(device)
        for tactic in served.tactics(spec, kernel, bucket, MAX_KV):
            candidate = Candidate(backend, tactic)
            longest = candidate.max_kv or MAX_KV
            gate = Gate(pool, inputs, chain, longest, (name, backend) in FINITE_KV)
            gate.load_first()
            impl = served.build(spec, bucket, longest, scratch.get(served.family), candidate.knobs)
            found = gate.check({str(candidate): timer.record(impl, inputs, chain)})
            wrong |= {f"batch {bucket}, {which}": what for which, what in found.items() if what}
            gate.restore()
    assert wrong == {}


@pytest.mark.parametrize("backend", ["fa3", "flashinfer_fa2_tc"])
def test_a_small_layer_without_graphs(backend):
    """What a memory checker can run: `PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer python -m pytest -m gpu -k
    small_layer tests/test_kernels_gpu.py`. Every tensor is then an allocation of its own, which graphs do not allow."""
    sizes = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim_qk": 64, "head_dim_vo": 64, "page_size": 16}
    spec, device, bucket, longest = spec_of(**sizes, dtype="bf16", kv_dtype="bf16"), torch.device("cuda"), 4, 256
    support = registry.support(backend, spec, current_device())
    if not support.ok:
        pytest.skip(support.reason)
    served, scratch = registry.get(backend), Workspaces(device)
    scratch.reserve(served.family, served.workspace_bytes(spec, bucket, longest))
    pool = PagedPool(spec, gate_pages(spec, bucket, longest), 1, device)
    inputs, chain = pool.inputs(bucket, longest), pool.chain(bucket)
    gate = Gate(pool, inputs, chain, longest)
    gate.load_first()
    impl = served.build(spec, bucket, longest, scratch.get(served.family), {})
    assert gate.check({backend: CpuTimer().record(impl, inputs, chain)}) == {backend: ""}
