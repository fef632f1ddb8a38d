"""The torch backends on a GPU: captured in a CUDA graph once, then right for whatever lengths are set through it."""

from __future__ import annotations

import pytest
import torch

from dispatch.backends import registry
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


class Captured:
    """A step in a CUDA graph, captured with the lengths that its inputs hold now."""

    def __init__(self, impl, inputs, chain):
        self.impl, self.inputs, self.chain = impl, inputs, chain
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            self.step()
        side.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step()

    def step(self):
        self.impl.begin_step(self.inputs)
        for kv_cache, out in zip(self.chain.kv_caches, self.chain.outs, strict=True):
            self.impl.forward(self.chain.q, kv_cache, out, self.chain.sinks)

    def run(self):
        if self.impl.needs_plan:
            self.impl.plan(self.inputs)
        self.graph.replay()
        torch.cuda.synchronize()


@pytest.mark.parametrize("bucket", [1, 8])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_captured_step_passes_the_gate(layer, bucket):
    spec, device = spec_of(**LAYERS[layer]), torch.device("cuda")
    pool = PagedPool(spec, gate_pages(spec, bucket, MAX_KV), 2, device)
    inputs, chain = pool.inputs(bucket, MAX_KV), pool.chain(bucket)
    gate, recordings = Gate(pool, inputs, chain, MAX_KV), {}
    for name in registry.names():
        if registry.support(name, spec, current_device()).ok:
            for tactic in registry.get(name).tactics(spec, current_device(), bucket, MAX_KV):
                knobs = Candidate(name, tactic).knobs
                scratch = torch.zeros(0, dtype=torch.uint8, device=device)
                impl = registry.get(name).build(spec, bucket, MAX_KV, scratch, knobs)
                gate.load_first()
                recordings[f"{name}[{tactic}]"] = Captured(impl, inputs, chain)
    assert set(gate.check(recordings).values()) == {""}
