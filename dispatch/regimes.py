"""Regimes: the boxes of a bucket's (mean KV, skew) plane, and what serves each. Pure; needs numpy alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dispatch.candidate import Candidate
from dispatch.confirm import cross_fitted_speedup, decide_cells
from dispatch.decision import Decision, Rule
from dispatch.evidence import Evidence
from dispatch.part import Part
from dispatch.partition import Search
from dispatch.plane import Plane
from dispatch.samples import EVEN, Box, BucketSamples, Samples, log_of_times
from dispatch.subcells import Subcells


@dataclass(frozen=True, slots=True)
class Regime:
    """A decided box: where it lies, which cells of subcells.split (indices) fell into it, why, and what it gains.

    `speedup` over the default is cross-fitted (chosen on one half of the rounds, scored on the other).
    """

    box: Box
    cells: tuple[int, ...]
    decision: Decision
    speedup: float


def decide(samples: Samples) -> dict[int, tuple[Regime, ...]]:
    """The regimes of every measured bucket."""
    return {
        b.bucket: decide_bucket(
            b,
            samples.num_layers,
            samples.priority,
            samples.rule,
            [box for box in samples.incumbent if box.bucket == b.bucket],
        )
        for b in samples.buckets
    }


def decide_bucket(
    samples: BucketSamples, num_layers: int, priority: Sequence[str], rule: Rule, incumbent: Sequence[Box] = ()
) -> tuple[Regime, ...]:
    """Regimes that partition the bucket's cells, in order of their boxes' least mean KV and skew.

    The stored partition (`incumbent`) stays, each of its boxes under rule 4, unless a new one is faster by more
    than delta on average: boundaries must not flip on noise any more than winners.
    """
    if not np.isfinite(log_of_times(samples.step_us(num_layers))[0]).any():
        return ()
    parts_of_cells = Subcells.of(samples)
    evidence = Evidence.of(parts_of_cells.split(samples), parts_of_cells, num_layers, priority)
    plane = Plane.of(evidence, parts_of_cells.bins)
    search = Search(evidence, plane, rule)
    parts, held = search.best(), [""] * len(plane.mean_bin)
    cells_of = {box: search.inside(box) for box in incumbent}
    stored = [(box, cells) for box, cells in cells_of.items() if cells]
    if stored and sum(len(cells) for _, cells in stored) == len(plane.mean_bin):
        old = [Part(cells, (b.mean_kv_min, b.skew_min), (b.mean_kv_max, b.skew_max)) for b, cells in stored]
        names = [box.candidate for box, _ in stored]
        if not search.faster(parts, old, names):
            parts, held = old, names
    found = [_regime(samples.bucket, evidence, search, part, name) for part, name in zip(parts, held, strict=False)]
    return tuple(sorted(found, key=lambda regime: (regime.box.mean_kv_min, regime.box.skew_min)))


def _regime(bucket: int, evidence: Evidence, search: Search, part: Part, incumbent: str) -> Regime:
    decision = decide_cells(evidence, part.cells, search.rule, incumbent)
    speedup = 1.0
    if decision.candidate != evidence.candidates[0]:
        speedup = cross_fitted_speedup(evidence, part.cells, search.rule, incumbent)
    (mean_min, mean_max), (skew_min, skew_max) = search.plane.bounds(part)
    limit = Candidate.parse(decision.candidate).max_kv
    if limit is not None:  # nowhere in the box may a request be longer; its own rounds are not (within_limit)
        skew_max = min(skew_max, int(evidence.skew_range[1, list(part.cells)].max()))
        mean_max = min(mean_max, EVEN * (limit + 1) // (skew_max + 1))
    box = Box(bucket, mean_min, mean_max, skew_min, skew_max, decision.candidate)
    return Regime(box, part.cells, decision, speedup)
