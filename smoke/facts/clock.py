"""What the first replays cost while the clocks still climb. To be measured before anything else loads the GPU."""

from __future__ import annotations

import statistics
from contextlib import suppress
from functools import partial
from time import monotonic, sleep

import torch

from dispatch.bench.cuda_timer import CudaTimer
from smoke.facts.table import Found, Row

FIRST = 20  # replays that count as the first
LOAD_S = 0.3
IDLE_S = 5.0
LAYERS = 8


def clocks(timer: CudaTimer) -> Found:
    """8: eight layers without attention: without a warm-up, after 0.3 s of load, and after the card was idle."""
    graph = timer.capture(partial(timer.filler(1).layers, LAYERS), torch.cuda.graph_pool_handle())
    torch.cuda.synchronize()
    times, mhz = {}, {"at start": _mhz()}
    times["at start"] = _replays(timer, graph)
    end = monotonic() + LOAD_S
    while monotonic() < end:
        timer.replays_us([graph])
    times["after 0.3 s of load"] = _replays(timer, graph)
    mhz["after 0.3 s of load"] = _mhz()
    sleep(IDLE_S)
    mhz[f"after {IDLE_S:g} s idle"] = _mhz()
    times[f"after {IDLE_S:g} s idle"] = _replays(timer, graph)
    warm = statistics.median(times["after 0.3 s of load"])
    now = "; ".join(
        f"{when}: first {us[0] / warm:.2f}x, median of {FIRST} {statistics.median(us) / warm:.2f}x,"
        f" SM at {mhz[when]} MHz"
        for when, us in times.items()
    )
    row = Row(
        f"8 clocks: {LAYERS} layers without attention, of the warm {warm:.0f} us",
        "first cells 1.5x; 345 MHz idle, 1980 under load (DESIGN 2.8)",
        now,
        "memory-bound work; the clock is that of the driver's last sample period",
    )
    return Found((row,), {"us": times, "sm_mhz": mhz})


def _replays(timer: CudaTimer, graph: torch.cuda.CUDAGraph) -> list[float]:
    return [timer.replays_us([graph])[0] for _ in range(FIRST)]


def _mhz() -> int | None:
    with suppress(Exception):  # no driver library, or not told here
        return int(torch.cuda.clock_rate())
    return None
