"""How fast this device reads its memory when nothing else is to be done: the floor below which no kernel gets."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, perf_counter_ns

import torch

from dispatch.bench.memory import give_back

BYTES = {"cuda": 1 << 30, "cpu": 1 << 28}  # far above the last cache
SECONDS = 0.5  # clocks climb for 0.3 s


def read_bytes_per_s(device: torch.device) -> float:
    """The best of many plain reads by torch, of two kinds: a sum, and a matrix-vector product.

    Raises RuntimeError where there is no memory for it.
    """
    side = int((BYTES[device.type] // 4) ** 0.5)
    best_us = _best_us(side, device)
    give_back(device)  # who asks the driver next what is free would miss the matrix
    return side * side * 4 / best_us * 1e6


def _best_us(side: int, device: torch.device) -> float:
    matrix, vector = torch.ones(side, side, device=device), torch.ones(side, device=device)
    out, total = torch.empty(side, device=device), torch.empty((), device=device)
    reads: tuple[Callable[[], object], ...] = (
        lambda: torch.sum(matrix, (0, 1), out=total),
        lambda: torch.mv(matrix, vector, out=out),
    )
    end, best_us = monotonic() + SECONDS, min(_read_us(read, device) for read in reads)
    while monotonic() < end:
        best_us = min(best_us, *(_read_us(read, device) for read in reads))
    return best_us


def _read_us(read: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        start = perf_counter_ns()
        read()
        return (perf_counter_ns() - start) / 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    read()  # while it runs, the host gets ahead, so that no launch is on the clock
    begin.record()
    read()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3
