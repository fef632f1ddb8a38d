"""The timer for a GPU: CUDA graph replays over a cold cache, with the layers kept apart as a model keeps them."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise
from time import perf_counter_ns
from typing import Any

import torch

from dispatch.backends.base import DecodeImpl
from dispatch.bench.filler import Filler, FillerWeights
from dispatch.bench.pool import Chain
from dispatch.bench.sanity import nominal_bandwidth
from dispatch.bench.timer import StepTime
from dispatch.step import StepInputs

# What is written before a sample. Twice the L2 cache would push all else out of it; the rest is time for the host to
# launch the sample in: on an H200, whose cache is of 60 MiB, 58 us.
FLUSH_CACHES, LEAST_FLUSH_BYTES = 3, 180 << 20
FILLER_ROUNDS = 31


@cache
def _capture_stream(device_index: int) -> torch.cuda.Stream:
    """One for all captures of the process: cuBLAS keeps a workspace (32 MiB on Hopper) for each stream that it saw."""
    return torch.cuda.Stream(device_index)  # type: ignore[no-untyped-call]


class CudaTimer:
    """Captures a candidate once, for the longest request; lengths are set through metadata, as in production."""

    chain_layers: tuple[int, ...] = (8, 2, 1)

    def __init__(self, device: torch.device, flushes: bool = True) -> None:
        """`flushes`: before each sample; False where nothing is timed."""
        self.device = device
        self.peak_bytes_per_s = nominal_bandwidth(device)
        cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        flush_bytes = max(FLUSH_CACHES * cache_bytes, LEAST_FLUSH_BYTES) if flushes else 0
        self.flush = torch.empty(flush_bytes, dtype=torch.uint8, device=device)
        self.weights = FillerWeights(device)
        self.stream = _capture_stream(torch.cuda.current_device() if device.index is None else device.index)
        self._fillers: dict[int, Filler] = {}
        self._filler_us: dict[tuple[int, int], float] = {}

    def record(self, impl: DecodeImpl, inputs: StepInputs, chain: Chain) -> _Captured:
        return _Captured(self, impl, inputs, chain)

    def filler(self, batch: int) -> Filler:
        """The rest of a layer for a batch."""
        if batch not in self._fillers:
            self._fillers[batch] = Filler(self.weights, batch)
        return self._fillers[batch]

    def filler_us(self, layers: int, batch: int) -> float:
        """Microseconds of the filler of so many layers, alone: measured once, so that all candidates lose the same."""
        if (layers, batch) not in self._filler_us:
            graph = self.capture(partial(self.filler(batch).layers, layers), torch.cuda.graph_pool_handle())
            times = [self.replays_us([graph])[0] for _ in range(FILLER_ROUNDS)]
            self._filler_us[layers, batch] = statistics.median(times)
        return self._filler_us[layers, batch]

    def capture(self, work: Callable[[], object], pool: Any) -> torch.cuda.CUDAGraph:
        """Run once, so that everything is loaded and compiled, then capture."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            work()
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # a begin_step may have no work
            with torch.cuda.graph(graph, pool=pool, stream=self.stream):
                work()
        return graph

    def replays_us(self, graphs: Sequence[torch.cuda.CUDAGraph]) -> list[float]:
        """Microseconds of each graph, replayed one after the other over a cold cache."""
        return self.replay(graphs)()

    def replay(self, graphs: Sequence[torch.cuda.CUDAGraph]) -> Callable[[], list[float]]:
        """Launch the same; what is returned waits for its end.

        The flush also gives the host time to launch them all, so that no launch is on the clock.
        """
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(graphs) + 1)]  # type: ignore[no-untyped-call]
        self.flush.fill_(0)
        events[0].record()
        for graph, end in zip(graphs, events[1:], strict=True):
            graph.replay()
            end.record()

        def read() -> list[float]:
            events[-1].synchronize()
            return [float(begin.elapsed_time(end)) * 1e3 for begin, end in pairwise(events)]

        return read


class _Captured:
    """begin_step in a graph of its own, and the chain of layers with their filler in another."""

    def __init__(self, timer: CudaTimer, impl: DecodeImpl, inputs: StepInputs, chain: Chain) -> None:
        self.timer, self.impl, self.inputs, self.chain = timer, impl, inputs, chain
        self.batch = len(inputs.lengths_host)
        self.filler = timer.filler(self.batch)
        self.planned = torch.cuda.Event()  # type: ignore[no-untyped-call]  # what the last plan queued has been done
        self._plan()
        # A pool of its own: begin_step may leave tensors in it for the layers, which another candidate's graph would
        # use as scratch if it shared the pool. Never the engine's.
        pool = torch.cuda.graph_pool_handle()
        self.begin = timer.capture(lambda: impl.begin_step(inputs), pool)
        counts = {min(n, len(chain.outs)) for n in timer.chain_layers}
        self.layers = {n: timer.capture(partial(self._forward, n), pool) for n in counts}

    def run(self, layers: int) -> None:
        self._plan()
        self.begin.replay()
        self.layers[min(n for n in self.layers if n >= layers)].replay()
        torch.cuda.synchronize(self.timer.device)

    def start(self, layers: int) -> Callable[[], StepTime]:
        filler_us = self.timer.filler_us(layers, self.batch)
        if self.impl.needs_plan:  # what it would wait for is no part of it
            if self.impl.plan_waits:
                torch.cuda.synchronize(self.timer.device)
            else:
                self.planned.synchronize()
        plan_us = self._plan()
        replayed = self.timer.replay([self.begin, self.layers[layers]])

        def read() -> StepTime:
            begin_us, chain_us = replayed()
            return StepTime(plan_us, begin_us, (chain_us - filler_us) / layers)

        return read

    def _plan(self) -> float:
        if not self.impl.needs_plan:
            return 0.0
        start = perf_counter_ns()
        self.impl.plan(self.inputs)
        took_us = (perf_counter_ns() - start) / 1e3
        self.planned.record()
        return took_us

    def _forward(self, layers: int) -> None:
        for kv_cache, out in zip(self.chain.kv_caches[:layers], self.chain.outs[:layers], strict=True):
            self.filler.before()
            self.impl.forward(self.chain.q, kv_cache, out, self.chain.sinks)
            self.filler.after()
