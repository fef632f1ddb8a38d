"""Regimes: cut a bucket's (mean KV, max KV) plane into the few boxes that lose least. Pure; needs numpy alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dispatch.candidate import Candidate
from dispatch.confirm import cross_fitted_speedup, decide_cells
from dispatch.decision import Decision, Rule
from dispatch.samples import TWIN, Box, BucketSamples, Cell, Samples
from dispatch.selector import Evidence, median_of_rounds, over_stored

MAX_BOXES = 3  # each box may cost the engine one more CUDA graph
FEWER_BOXES_MARGIN = 0.01  # a partition with fewer boxes wins if it loses no more than 1%


@dataclass(frozen=True, slots=True)
class Regime:
    """A decided box: where it lies, which cells (indices) fell into it, why, and what it gains.

    `speedup` over the default is cross-fitted (chosen on one half of the rounds, scored on the other).
    """

    box: Box
    cells: tuple[int, ...]
    decision: Decision
    speedup: float


@dataclass(frozen=True, slots=True)
class _Part:
    """Some cells with the cuts around them; None where no cut bounds that side."""

    cells: tuple[int, ...]
    low: tuple[int | None, int | None] = (None, None)  # (mean KV, max KV)
    high: tuple[int | None, int | None] = (None, None)


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
    """At most 3 regimes that partition the bucket's cells.

    The stored partition (`incumbent`) stays, each of its boxes under rule 4, unless a new one is faster by more
    than delta on average: boundaries must not flip on noise any more than winners.
    """
    evidence = Evidence.of(samples, num_layers, priority)
    if not evidence.rounds[0].any():
        return ()
    measured = tuple(range(len(samples.cells)))  # one without a time is measured for nobody, and keeps the default
    search = _Search(evidence, samples.cells, rule)
    parts, held = search.best(measured), [""] * MAX_BOXES
    cells_of = {box: tuple(i for i in measured if search.inside(i, box)) for box in incumbent}
    stored = [(box, cells) for box, cells in cells_of.items() if cells]
    if stored and sum(len(cells) for _, cells in stored) == len(measured):
        old = [_Part(cells, (b.mean_kv_min, b.max_kv_min), (b.mean_kv_max, b.max_kv_max)) for b, cells in stored]
        names = [box.candidate for box, _ in stored]
        if not search.faster(parts, old, names):
            parts, held = old, names
    return tuple(search.regime(samples.bucket, part, name) for part, name in zip(parts, held, strict=False))


class _Search:
    """Decides sets of cells, each once, for the many partitions that share them."""

    def __init__(self, evidence: Evidence, cells: Sequence[Cell], rule: Rule) -> None:
        self.evidence, self.points, self.rule = evidence, [(c.mean_kv, c.max_kv) for c in cells], rule
        self.decided: dict[tuple[int, ...], tuple[str, float]] = {}
        real = [i for i, name in enumerate(evidence.candidates) if name != TWIN]
        best = np.where(np.isnan(evidence.medians[real]), np.inf, evidence.medians[real]).min(axis=0)
        self.best_r = np.where(np.isfinite(best), best, 0.0)

    def pick(self, cells: tuple[int, ...]) -> tuple[str, float]:
        """What the rule picks for these cells, and its regret: the sum over them of log time above the best."""
        if cells not in self.decided:
            name = decide_cells(self.evidence, cells, self.rule).candidate
            own = self.evidence.medians[self.evidence.candidates.index(name), list(cells)]
            self.decided[cells] = name, float((np.nan_to_num(own) - self.best_r[list(cells)]).sum())
        return self.decided[cells]

    def inside(self, cell: int, box: Box) -> bool:
        return box.holds(*self.points[cell])

    def best(self, cells: tuple[int, ...]) -> list[_Part]:
        """The fewest boxes within the margin of the least mean regret of any partition into at most 3."""
        best: dict[int, tuple[float, list[_Part]]] = {}
        for parts in self.partitions([_Part(cells)]):
            regret = sum(self.pick(part.cells)[1] for part in parts) / len(cells)
            if len(parts) not in best or regret < best[len(parts)][0]:
                best[len(parts)] = regret, parts
        least = min(regret for regret, _ in best.values())
        return next(best[n][1] for n in sorted(best) if best[n][0] <= least + FEWER_BOXES_MARGIN)

    def partitions(self, parts: list[_Part]) -> Iterator[list[_Part]]:
        """`parts`, and every partition that cuts them further, a straight cut at a time."""
        yield parts
        if len(parts) < MAX_BOXES:
            for i, part in enumerate(parts):
                for two in self.cuts(part):
                    yield from self.partitions([*parts[:i], *two, *parts[i + 1 :]])

    def cuts(self, part: _Part) -> Iterator[list[_Part]]:
        """Every cut of a part in two, at the geometric midpoint of neighbouring coordinates."""
        for axis in (0, 1):
            values = sorted({self.points[i][axis] for i in part.cells})
            for below, above in pairwise(values):
                middle = math.isqrt(below * above)
                yield [
                    _Part(
                        tuple(i for i in part.cells if self.points[i][axis] <= middle),
                        part.low,
                        _with(part.high, axis, middle),
                    ),
                    _Part(
                        tuple(i for i in part.cells if self.points[i][axis] > middle),
                        _with(part.low, axis, middle + 1),
                        part.high,
                    ),
                ]

    def faster(self, new: list[_Part], old: list[_Part], old_names: list[str]) -> bool:
        """Whether what `new` picks is clearly faster than the stored choices, on average over the cells."""
        was, now = {}, {}
        for part, name in zip(old, old_names, strict=True):
            was.update(dict.fromkeys(part.cells, decide_cells(self.evidence, part.cells, self.rule, name).candidate))
        for part in new:
            now.update(dict.fromkeys(part.cells, self.pick(part.cells)[0]))
        row = self.evidence.candidates.index
        log_step = self.evidence.log_step
        gains = [float(median_of_rounds(log_step[row(now[c]), c] - log_step[row(was[c]), c])) for c in now]
        return float(np.nanmean(gains)) <= -over_stored(self.evidence.delta(list(now), self.rule), self.rule)

    def regime(self, bucket: int, part: _Part, incumbent: str) -> Regime:
        """The part as a box: cuts bound it, and where there is none, its own outermost cells."""
        decision = decide_cells(self.evidence, part.cells, self.rule, incumbent)
        speedup = 1.0
        if decision.candidate != self.evidence.candidates[0]:
            speedup = cross_fitted_speedup(self.evidence, part.cells, self.rule, incumbent)
        means, maxima = zip(*(self.points[i] for i in part.cells), strict=True)
        limit = Candidate.parse(decision.candidate).max_kv
        max_kv_max = max(maxima) if part.high[1] is None else part.high[1]
        box = Box(
            bucket,
            min(means) if part.low[0] is None else part.low[0],
            max(means) if part.high[0] is None else part.high[0],
            min(maxima) if part.low[1] is None else part.low[1],
            max_kv_max if limit is None else min(max_kv_max, limit),
            decision.candidate,
        )
        return Regime(box, part.cells, decision, speedup)


def _with(pair: tuple[int | None, int | None], axis: int, value: int) -> tuple[int | None, int | None]:
    return (value, pair[1]) if axis == 0 else (pair[0], value)
