"""Kernels as most benchmarks time them: one after the other in a graph, with nothing between."""

from __future__ import annotations

import torch

from dispatch.backends import DecodeImpl
from dispatch.bench.cuda_timer import CudaTimer
from dispatch.bench.pool import Chain
from dispatch.bench.timer import StepTime
from dispatch.step import StepInputs


class Bare:
    """Layers back to back with nothing between, each launch as it comes; begin_step in a graph of its own."""

    def __init__(self, timer: CudaTimer, impl: DecodeImpl, inputs: StepInputs, chain: Chain, layers: int) -> None:
        self.timer, self.impl, self.inputs, self.chain, self.count = timer, impl, inputs, chain, layers
        if impl.needs_plan:
            impl.plan(inputs)
        pool = torch.cuda.graph_pool_handle()
        self.begin = timer.capture(lambda: impl.begin_step(inputs), pool)
        self.layers = timer.capture(self._forward, pool)

    def run(self) -> None:
        if self.impl.needs_plan:
            self.impl.plan(self.inputs)
        self.begin.replay()
        self.layers.replay()
        torch.cuda.synchronize()

    def time(self, layers: int) -> StepTime:
        """`layers` is what was captured, whatever is asked for."""
        if self.impl.needs_plan:
            self.impl.plan(self.inputs)
        begin_us, chain_us = self.timer.replays_us([self.begin, self.layers])
        return StepTime(0.0, begin_us, chain_us / self.count)

    def _forward(self) -> None:
        chain, n = self.chain, self.count
        for kv_cache, out in zip(chain.kv_caches[:n], chain.outs[:n], strict=True):
            self.impl.forward(chain.q, kv_cache, out, chain.sinks)
