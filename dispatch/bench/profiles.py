"""Length profiles: how the KV lengths of a batch spread around their mean."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import starmap

import numpy as np
from numpy.typing import NDArray

from dispatch.bench.trace import Trace
from dispatch.samples import EVEN, Cell
from dispatch.subcells import cell_of

Lengths = NDArray[np.float64]

# Log-normal; production batches of 8 to 128 have max / mean between 1.4 and 7.3. Of each, what its rounds spread over:
# with one sigma alone, the longest of 128 requests is always 2 or 4 times the mean, and nothing between is measured.
SIGMAS = {0.0: (0.0, 0.0), 0.3: (0.0, 0.5), 0.7: (0.5, 1.0), 1.2: (1.0, 1.6)}
MOST_ALIKE = 4  # nearly a fourth of a batch at most is as long as its longest, as where a service limits the length
SHORTFALL = 0.05  # a cell whose mean falls further short of its point after clipping is not that point
FULL_STEP = 1.1  # a point for the full server, unless the last one is as near as this
SEED = 20  # lengths are new each round, and the same in every run: two runs differ by their timings alone


class Profile(ABC):
    """How the lengths of a full batch spread. `name` is part of a stored plan's key."""

    name: str

    @abstractmethod
    def lengths(self, rng: np.random.Generator, batch: int, means: Lengths, longest: int) -> Lengths:
        """[rounds, batch] lengths in tokens, of mean `means[round]`; `longest` is the longest served."""


class Drawn(Profile):
    """A profile of relative lengths, rescaled to the mean."""

    @abstractmethod
    def draw(self, rng: np.random.Generator, size: tuple[int, int]) -> Lengths:
        """[rounds, batch] positive lengths, in any unit."""

    def lengths(self, rng: np.random.Generator, batch: int, means: Lengths, longest: int) -> Lengths:
        raw = self.draw(rng, (len(means), batch))
        scaled: Lengths = raw * (means / raw.mean(axis=1))[:, None]
        return scaled


class LogNormal(Drawn):
    """exp(sigma * normal); sigma 0 is equal lengths.

    `sigmas`: in each round another one, evenly spread over these, and so many of the longest requests cut down to one
    length as there may be where a service limits it: in production traces several are often as long as the longest, and
    kernels tell such a batch from one with a single long request.
    """

    def __init__(self, sigma: float, sigmas: tuple[float, float] | None = None) -> None:
        self.sigmas, self.alike = sigmas or (sigma, sigma), MOST_ALIKE if sigmas else None
        self.name = "equal" if sigma == 0 else f"lognormal-{sigma:g}"

    def draw(self, rng: np.random.Generator, size: tuple[int, int]) -> Lengths:
        low, high = self.sigmas
        rounds, batch = size
        sigmas = low + (high - low) * _spread(rng, rounds)
        lengths: Lengths = np.exp(sigmas[:, None] * rng.standard_normal(size))
        if self.alike is None:
            return lengths
        alike = np.maximum(1, np.rint((batch / self.alike) ** _spread(rng, rounds))).astype(int)
        limits = np.sort(lengths, axis=1)[np.arange(rounds), batch - alike]
        cut: Lengths = np.minimum(lengths, limits[:, None])
        return cut


class OneLong(Profile):
    """One request is as long as may be, to nine tenths of the tokens; the others share the rest.

    This is the farthest corner of the region that a plan may claim. Without it, a winner measured at moderate
    spreads would serve a long request among short ones unmeasured.
    """

    name = "one-long"

    def lengths(self, rng: np.random.Generator, batch: int, means: Lengths, longest: int) -> Lengths:
        tokens, rounds = batch * means, len(means)
        long = tokens if batch == 1 else np.minimum(0.9 * tokens, longest)
        lengths = np.repeat(((tokens - long) / max(1, batch - 1))[:, None], batch, axis=1)
        lengths[np.arange(rounds), rng.integers(batch, size=rounds)] = long
        return lengths


class FromTrace(Drawn):
    """Lengths as a server that replays the trace sees them at a random decode step.

    In a full batch, where a finished request is replaced by the next, a slot holds a request with a probability
    proportional to the steps that it takes, its output tokens, and is equally likely at each of them.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace, self.name = trace, f"trace-{trace.name}"

    def draw(self, rng: np.random.Generator, size: tuple[int, int]) -> Lengths:
        outputs = self.trace.output_tokens
        request = rng.choice(len(outputs), size=size, p=outputs / outputs.sum())
        generated = rng.integers(1, outputs[request] + 1)
        return (self.trace.input_tokens[request] + generated).astype(np.float64)


@dataclass(frozen=True, eq=False)
class PlannedCell:
    """A cell and the lengths of each of its rounds, int64 [rounds, bucket]."""

    cell: Cell
    lengths: NDArray[np.int64]

    @classmethod
    def of(cls, lengths: NDArray[np.int64], mean_kv: int, profile: str) -> PlannedCell:
        """A cell around a point of the KV grid."""
        skews = lengths.max(axis=1) * EVEN // means_of(lengths)
        return cls(cell_of(mean_kv, skews, profile), lengths)


def _spread(rng: np.random.Generator, count: int) -> Lengths:
    """So many numbers, evenly spread between 0 and 1, in a random order."""
    spread: Lengths = (rng.permutation(count) + 0.5) / count
    return spread


def means_of(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of each round, the mean length, rounded up, as a plan is asked."""
    means: NDArray[np.int64] = -(-lengths.sum(axis=1) // lengths.shape[1])
    return means


def default_profiles(traces: Sequence[Trace] = ()) -> tuple[Profile, ...]:
    """From equal lengths to one long request, and the user's traces."""
    general: tuple[Profile, ...] = (*starmap(LogNormal, SIGMAS.items()), OneLong())
    return (*general, *map(FromTrace, traces))


def plan_cells(
    bucket: int, grid: Sequence[int], profiles: Sequence[Profile], max_seq_len: int, capacity: int, rounds: int
) -> tuple[PlannedCell, ...]:
    """The cells of a bucket with their lengths, clipped at the longest served.

    The means of a cell's rounds are spread evenly, in logarithms, from the middle between its point and the one below
    to the middle to the one above, other ones for each profile: a box of cells is then measured all over, and not at
    its points alone. Points above the server's KV capacity (tokens) give way to one at a full server. Cells that
    clipping moved off their point are left out.
    """
    planned: list[PlannedCell] = []
    points = _points(grid, min(max_seq_len, capacity // bucket))
    for i, mean_kv in enumerate(points):
        low, high = (math.sqrt(mean_kv * points[k]) for k in (max(0, i - 1), min(i + 1, len(points) - 1)))
        for j, profile in enumerate(profiles):
            rng = np.random.default_rng([SEED, bucket, i, j])
            means = low * (high / low) ** ((rng.permutation(rounds) + (j + 0.5) / len(profiles)) / rounds)
            lengths = np.clip(np.rint(profile.lengths(rng, bucket, means, max_seq_len)), 1, max_seq_len)
            if lengths.mean() >= (1 - SHORTFALL) * means.mean():
                planned.append(PlannedCell.of(lengths.astype(np.int64), mean_kv, profile.name))
    return tuple(planned)


def _points(grid: Sequence[int], full: int) -> list[int]:
    """The grid up to `full`, the mean length at which the server is full or requests are longest, and that itself."""
    points = [mean_kv for mean_kv in grid if mean_kv <= full]
    if full >= 1 and (not points or full > FULL_STEP * points[-1]):
        points.append(full)
    return points
