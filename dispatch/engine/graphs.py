"""A step captured as a CUDA graph; on a CPU, a step that is run as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

Work = Callable[[], Any]


class Graphs(Protocol):
    """How steps are captured on one kind of device."""

    def capture(self, work: Work) -> Work:
        """What replays the work, and returns what it returned when it was captured, in the same memory.

        Runs it once before, so that everything is loaded and compiled.
        """
        ...

    def free_mib(self) -> float:
        """Memory that is free on the device, with nothing kept back by torch."""
        ...


class EagerSteps:
    """No capture: every replay is the step itself."""

    def capture(self, work: Work) -> Work:
        work()
        return work

    def free_mib(self) -> float:
        return 0.0


class CudaGraphs:
    """All graphs of an engine, in one memory pool: they run one at a time, so that they may share it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._begin()

    def capture(self, work: Work) -> Work:
        before = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(before)
        with torch.cuda.stream(self.stream):
            work()
        before.wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                output = work()
        except BaseException:
            # A capture that was broken off leaves its pool recording, and may leave its stream current.
            torch.cuda.set_stream(before)
            self._begin()
            raise
        torch.cuda.synchronize(self.device)

        def replay() -> Any:
            graph.replay()
            return output

        return replay

    def free_mib(self) -> float:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0] / (1 << 20)

    def _begin(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
