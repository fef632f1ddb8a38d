"""Whether tuning again gives the same plan: which choices differ between runs, and what that costs. Pure."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dispatch.candidate import Candidate
from dispatch.plan import StoredPlan
from dispatch.samples import BucketSamples, Cell, Samples, log_of_times, skew_of
from dispatch.subcells import Subcells


@dataclass(frozen=True, eq=False)
class Run:
    """A plan of one layer group, and the samples that it was decided from."""

    plan: StoredPlan
    samples: Samples


@dataclass(frozen=True, slots=True)
class Flip:
    """A cell of a bucket that a run serves with another candidate than most runs do.

    `run`: its place among the runs. `cost`: the logarithm of the time of its choice over that of most, a median over
    the rounds of all runs; below 0 where its choice is faster, None where no run timed both. `share`: of the bucket's
    rounds, the cell's.
    """

    bucket: int
    cell: Cell
    run: int
    choice: str
    majority: str
    cost: float | None
    share: float


@dataclass(frozen=True)
class Stability:
    """Of so many runs. `buckets`, `cells`: measured in any of them. `threshold`: what another plan of a bucket may
    cost, on average over the bucket's batches."""

    runs: int
    buckets: int
    cells: int
    threshold: float
    flips: tuple[Flip, ...]

    @property
    def share_of_buckets(self) -> float:
        """Of the buckets of all runs, those in which a cell is served otherwise than in most runs."""
        return len({(flip.run, flip.bucket) for flip in self.flips}) / max(1, self.runs * self.buckets)

    @property
    def share_of_cells(self) -> float:
        """Of the cells of all runs, those that are served otherwise than in most runs."""
        return len(self.flips) / max(1, self.runs * self.cells)

    @property
    def dearest(self) -> float:
        """What a bucket's plan of one run costs over that of most runs, on average over its batches: the dearest.

        Infinite with a flip whose cost is not known.
        """
        costs: dict[tuple[int, int], float] = defaultdict(float)
        for flip in self.flips:
            costs[flip.run, flip.bucket] += math.inf if flip.cost is None else flip.share * flip.cost
        return max(costs.values(), default=0.0)

    @property
    def cheap(self) -> bool:
        """Whether no other plan of a bucket costs more than the threshold."""
        return self.dearest <= self.threshold

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        shares = {"share_of_buckets": self.share_of_buckets, "share_of_cells": self.share_of_cells}
        dearest = None if math.isinf(self.dearest) else self.dearest
        return {**asdict(self), **shares, "dearest": dearest, "cheap": self.cheap}


def stability(runs: Sequence[Run]) -> Stability:
    """What differs between runs, of one layer group and machine.

    A cell is what the deciding rule sees as one: rounds of a KV point and profile with a longest request of one size.
    Lengths are the same in every run, and with them the cells.
    """
    flips: list[Flip] = []
    buckets, cells = 0, 0
    tables = [run.plan.table() for run in runs]
    for bucket in runs[0].plan.buckets:
        measured = [Subcells.of(one).split(one) for run in runs for one in run.samples.buckets if one.bucket == bucket]
        if not measured:
            continue
        buckets += 1
        cells += len(measured[0].cells)
        rounds = (measured[0].longest > 0).sum(axis=1)
        shares = rounds / rounds.sum()
        for c, cell in enumerate(measured[0].cells):
            entries = [table.lookup(bucket, cell.mean_kv, skew_of(cell.mean_kv, cell.max_kv)) for table in tables]
            chosen = [
                str(Candidate(entry.backend, entry.tactic)) if entry else run.plan.default
                for entry, run in zip(entries, runs, strict=True)
            ]
            ((majority, _),) = Counter(chosen).most_common(1)
            for i, choice in enumerate(chosen):
                if choice != majority:
                    cost = _cost(measured, c, choice, majority, runs[0].samples.num_layers)
                    flips.append(Flip(bucket, cell, i, choice, majority, cost, float(shares[c])))
    return Stability(len(runs), buckets, cells, runs[0].samples.rule.threshold, tuple(flips))


def _cost(measured: Sequence[BucketSamples], c: int, choice: str, majority: str, num_layers: int) -> float | None:
    """Of all runs' rounds in which both were timed."""
    differences: list[float] = []
    for one in measured:
        if {choice, majority} <= set(one.candidates):
            log = log_of_times(one.step_us(num_layers))[:, c]
            ratio = log[one.candidates.index(choice)] - log[one.candidates.index(majority)]
            differences += ratio[np.isfinite(ratio)].tolist()
    return float(np.median(differences)) if differences else None
