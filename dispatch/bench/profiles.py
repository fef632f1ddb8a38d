"""Length profiles: how the KV lengths of a batch spread around their mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dispatch.bench.trace import Trace
from dispatch.samples import Cell

SIGMAS = (0.0, 0.3, 0.7, 1.2)  # log-normal; production batches of 8 to 128 have max / mean between 1.4 and 7.3
SHORTFALL = 0.05  # a cell whose mean falls further short of its point after clipping is not that point
SEED = 20  # lengths are new each round, and the same in every run: two runs differ by their timings alone


class Profile(Protocol):
    """Draws relative lengths of a full batch."""

    @property
    def name(self) -> str: ...

    def draw(self, rng: np.random.Generator, size: tuple[int, int]) -> NDArray[np.float64]:
        """[rounds, batch] positive lengths, in any unit."""
        ...


@dataclass(frozen=True)
class LogNormal:
    """exp(sigma * normal); sigma 0 is equal lengths."""

    sigma: float

    @property
    def name(self) -> str:
        return "equal" if self.sigma == 0 else f"lognormal-{self.sigma:g}"

    def draw(self, rng: np.random.Generator, size: tuple[int, int]) -> NDArray[np.float64]:
        return np.exp(self.sigma * rng.standard_normal(size))


@dataclass(frozen=True)
class FromTrace:
    """Lengths as a server that replays the trace sees them at a random decode step.

    In a full batch, where a finished request is replaced by the next, a slot holds a request with a probability
    proportional to the steps that it takes, its output tokens, and is equally likely at each of them.
    """

    trace: Trace
    name: str = "trace"

    def draw(self, rng: np.random.Generator, size: tuple[int, int]) -> NDArray[np.float64]:
        outputs = self.trace.output_tokens
        request = rng.choice(len(outputs), size=size, p=outputs / outputs.sum())
        generated = rng.integers(1, outputs[request] + 1)
        return (self.trace.input_tokens[request] + generated).astype(np.float64)


@dataclass(frozen=True, eq=False)
class PlannedCell:
    """A cell and the lengths of each of its rounds, int64 [rounds, bucket]."""

    cell: Cell
    lengths: NDArray[np.int64]


def default_profiles(trace: Trace | None = None) -> tuple[Profile, ...]:
    """The log-normal profiles, and the user's trace."""
    general: tuple[Profile, ...] = tuple(LogNormal(sigma) for sigma in SIGMAS)
    return general if trace is None else (*general, FromTrace(trace))


def plan_cells(
    bucket: int, grid: Sequence[int], profiles: Sequence[Profile], max_seq_len: int, capacity: int, rounds: int
) -> tuple[PlannedCell, ...]:
    """The cells of a bucket with their lengths, rescaled to each point's mean and clipped at the longest served.

    Left out: cells above the server's KV capacity (tokens), cells that clipping moved off their point, and
    profiles that give the same lengths as an earlier one (at batch 1, all of them do).
    """
    planned: list[PlannedCell] = []
    for i, mean_kv in enumerate(grid):
        if bucket * mean_kv > capacity:
            continue
        here: list[PlannedCell] = []
        for j, profile in enumerate(profiles):
            raw = profile.draw(np.random.default_rng([SEED, bucket, i, j]), (rounds, bucket))
            scaled = raw * (mean_kv / raw.mean(axis=1, keepdims=True))
            lengths = np.clip(np.rint(scaled), 1, max_seq_len).astype(np.int64)
            if lengths.mean() < (1 - SHORTFALL) * mean_kv:
                continue
            if any(np.array_equal(lengths, other.lengths) for other in here):
                continue
            longest = round(float(np.median(lengths.max(axis=1))))
            here.append(PlannedCell(Cell(mean_kv, longest, profile.name), lengths))
        planned += here
    return tuple(planned)
