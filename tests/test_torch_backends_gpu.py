"""The torch backends on a GPU: captured in a CUDA graph once, then right for whatever lengths are set through it."""

from __future__ import annotations

import pytest
import torch

from dispatch.backends import registry
from dispatch.bench.cuda_timer import CudaTimer
from dispatch.bench.pool import PagedPool
from dispatch.candidate import Candidate
from dispatch.device import current_device
from dispatch.gate import Gate
from dispatch.gate_inputs import gate_pages
from tests.fakes import spec_of
from tests.test_gate import LAYERS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MAX_KV = 300


@pytest.mark.parametrize("bucket", [1, 8])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_captured_step_passes_the_gate(layer, bucket):
    spec, device = spec_of(**LAYERS[layer]), torch.device("cuda")
    pool = PagedPool(spec, gate_pages(spec, bucket, MAX_KV), 2, device)
    inputs, chain = pool.inputs(bucket, MAX_KV), pool.chain(bucket)
    gate, recordings, timer = Gate(pool, inputs, chain, MAX_KV), {}, CudaTimer(device)
    for name in registry.names():
        if registry.support(name, spec, current_device()).ok:
            for tactic in registry.get(name).tactics(spec, current_device(), bucket, MAX_KV):
                knobs = Candidate(name, tactic).knobs
                scratch = torch.zeros(0, dtype=torch.uint8, device=device)
                impl = registry.get(name).build(spec, bucket, MAX_KV, scratch, knobs)
                gate.load_first()
                recordings[f"{name}[{tactic}]"] = timer.record(impl, inputs, chain)
    assert set(gate.check(recordings).values()) == {""}
