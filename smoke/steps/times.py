"""Whole steps timed in turn: each runner serves the same batch, in shuffled order, round after round."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray

from dispatch.engine.runner import DecodeGraphRunner
from smoke.steps.engine import StackEngine

ROUNDS = 9
ON, OFF, AGAIN = "on", "off", "off again"  # the last: the default a second time, by graphs of its own
ARMS = (ON, OFF, AGAIN)


@dataclass(frozen=True)
class StepTimes:
    """A batch. `served`: what served it with the switch on. By arm, medians of ROUNDS whole steps: their milliseconds,
    and the microseconds until run() returned."""

    mean_kv: int
    max_kv: int
    served: str
    ms: Mapping[str, float]
    host_us: Mapping[str, float]

    @property
    def gain(self) -> float:
        """How many times faster with the switch on."""
        return self.ms[OFF] / self.ms[ON]

    @property
    def twin(self) -> float:
        """The same of the default against itself: the noise."""
        return self.ms[OFF] / self.ms[AGAIN]


def time_steps(
    engine: StackEngine, runners: Mapping[str, DecodeGraphRunner], batches: NDArray[np.int64]
) -> list[StepTimes]:
    """A row for each batch of `batches`, int64 [count, rows]. A step is timed from the call of run() to its end on the
    device, with nothing else under way: host work, plan() among it, counts in full."""
    rng = np.random.default_rng(batches.shape)
    found = []
    for lengths in batches:
        host, table = torch.from_numpy(lengths.astype(np.int32)), engine.table(lengths)
        before = dict(runners[ON].counts.hits)
        for arm in ARMS:
            _step(runners[arm], host, table, engine.device)  # what is cold at first is not timed
        times: dict[str, list[tuple[float, float]]] = {arm: [] for arm in ARMS}
        for _ in range(ROUNDS):
            for arm in rng.permutation(ARMS).tolist():
                times[arm].append(_step(runners[arm], host, table, engine.device))
        hits = runners[ON].counts.hits
        served = [what for (bucket, what), count in hits.items() if count != before.get((bucket, what), 0)]
        ms, host_us = (
            {arm: statistics.median(t[part] for t in taken) for arm, taken in times.items()} for part in (0, 1)
        )
        found.append(StepTimes(round(lengths.mean()), int(lengths.max()), ", ".join(served), ms, host_us))
    return found


def _step(
    runner: DecodeGraphRunner, host: torch.Tensor, table: torch.Tensor, device: torch.device
) -> tuple[float, float]:
    """Milliseconds of a step, and microseconds until run() returned."""
    _wait(device)
    start = perf_counter()
    runner.run(host, [table])
    returned = perf_counter()
    _wait(device)
    return (perf_counter() - start) * 1e3, (returned - start) * 1e6


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
