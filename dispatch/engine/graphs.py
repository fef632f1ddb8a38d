"""A step captured as a CUDA graph; on a CPU, a step that is run as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import torch

Work = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Captured:
    """`replay` runs the step and returns what it returned when it was captured, in the same memory.

    `seconds` and `mib`: what the capture cost.
    """

    replay: Work
    seconds: float
    mib: float


class Graphs(Protocol):
    """How steps are captured on one kind of device."""

    def capture(self, work: Work) -> Captured:
        """Run once, so that everything is loaded and compiled, then capture."""
        ...


class EagerSteps:
    """No capture: every replay is the step itself."""

    def capture(self, work: Work) -> Captured:
        start = perf_counter()
        work()
        return Captured(work, perf_counter() - start, 0.0)


class CudaGraphs:
    """All graphs of an engine, in one memory pool: they run one at a time, so that they may share it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, work: Work) -> Captured:
        start, before = perf_counter(), torch.cuda.mem_get_info(self.device)[0]
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            work()
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            output = work()
        torch.cuda.synchronize(self.device)
        mib = (before - torch.cuda.mem_get_info(self.device)[0]) / (1 << 20)

        def replay() -> Any:
            graph.replay()
            return output

        return Captured(replay, perf_counter() - start, max(0.0, mib))
