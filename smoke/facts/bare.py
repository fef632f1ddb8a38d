"""Kernels as most benchmarks time them: one after the other in a graph, with nothing between, or a product alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from dispatch.backends import DecodeImpl
from dispatch.bench.cuda_timer import FILLER_ROUNDS, CudaTimer
from dispatch.bench.pool import Chain
from dispatch.bench.timer import StepTime
from dispatch.step import StepInputs

PRODUCT_SHAPE = (8192, 4096)  # 64 MiB in bf16, as in DESIGN 2.4


class Bare:
    """Layers back to back, each launch as it comes; begin_step in a graph of its own. `product`: subtracted."""

    def __init__(
        self, timer: CudaTimer, impl: DecodeImpl, inputs: StepInputs, chain: Chain, layers: int, product: bool
    ) -> None:
        self.timer, self.impl, self.inputs, self.chain, self.count = timer, impl, inputs, chain, layers
        if impl.needs_plan:
            impl.plan(inputs)
        pool = torch.cuda.graph_pool_handle()
        self.begin = timer.capture(lambda: impl.begin_step(inputs), pool)
        self.product: tuple[torch.Tensor, ...] = ()
        self.alone: torch.cuda.CUDAGraph | None = None
        if product:
            vectors = (torch.zeros(n, dtype=torch.bfloat16, device=timer.device) for n in PRODUCT_SHAPE[::-1])
            self.product = (torch.zeros(PRODUCT_SHAPE, dtype=torch.bfloat16, device=timer.device), *vectors)
            self.alone = timer.capture(lambda: [self._multiply() for _ in range(layers)], pool)
        self.layers = timer.capture(self._forward, pool)
        self.product_us: float | None = None

    def run(self, layers: int) -> None:
        """All that were captured."""
        if self.impl.needs_plan:
            self.impl.plan(self.inputs)
        self.begin.replay()
        self.layers.replay()
        torch.cuda.synchronize()

    def start(self, layers: int) -> Callable[[], StepTime]:
        """`layers` is what was captured, whatever is asked for."""
        if self.product_us is None:
            self.product_us = 0.0
            if self.alone is not None:
                self.product_us = statistics.median(
                    self.timer.replays_us([self.alone])[0] for _ in range(FILLER_ROUNDS)
                )
        if self.impl.needs_plan:
            self.impl.plan(self.inputs)
        begin_us, chain_us = self.timer.replays_us([self.begin, self.layers])
        time = StepTime(0.0, begin_us, (chain_us - self.product_us) / self.count)
        return lambda: time

    def _forward(self) -> None:
        chain, n = self.chain, self.count
        for kv_cache, out in zip(chain.kv_caches[:n], chain.outs[:n], strict=True):
            self.impl.forward(chain.q, kv_cache, out, chain.sinks)
            self._multiply()

    def _multiply(self) -> None:
        if self.product:
            matrix, vector, result = self.product
            torch.mv(matrix, vector, out=result)
