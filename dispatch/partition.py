"""Cutting a bucket's (mean KV, skew) plane into the boxes that gain most. Pure; needs numpy alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from dispatch.borders import Plane, settled
from dispatch.confirm import decide_cells
from dispatch.decision import Rule
from dispatch.evidence import Evidence, median_of_rounds
from dispatch.part import Part, with_end
from dispatch.samples import EVEN, Box, BucketSamples, skew_of
from dispatch.selector import over_stored

BOX_MARGIN = 0.003  # what one more box must gain, on average over the bucket's batches
DEPTH = 3  # how often a part is cut further, into up to three each time

Bounds = tuple[tuple[int, int], tuple[int, int]]
"""Of the mean KV and of the skew, both ends inclusive."""


class Search:
    """Decides sets of cells, each once, for the many partitions that share them."""

    def __init__(self, evidence: Evidence, samples: BucketSamples, rule: Rule) -> None:
        """`samples`: those of the evidence, in cells whose skews lie close together (subcells.split)."""
        self.evidence, self.rule = evidence, rule
        means = [cell.mean_kv for cell in samples.cells]
        longest = [own[own > 0] for own in samples.longest]
        least, most = (
            [max(EVEN, skew_of(mean, int(end(own)))) for mean, own in zip(means, longest, strict=True)]
            for end in (np.min, np.max)
        )
        self.plane = Plane(means, least, most)
        self.decided: dict[tuple[int, ...], tuple[str, float]] = {}

    def pick(self, cells: tuple[int, ...]) -> tuple[str, float]:
        """What the rule picks for these cells, and its cost: the sum of log time over the default's, by rounds."""
        if cells not in self.decided:
            name = decide_cells(self.evidence, cells, self.rule).candidate
            own = self.evidence.medians[self.evidence.candidates.index(name), list(cells)]
            self.decided[cells] = name, float((np.nan_to_num(own) * self.evidence.planned[list(cells)]).sum())
        return self.decided[cells]

    def inside(self, box: Box) -> tuple[int, ...]:
        """The cells of which every batch lies in the box."""
        return tuple(
            i
            for i, mean in enumerate(self.plane.means)
            if box.mean_kv_min <= mean <= box.mean_kv_max
            and box.skew_min <= self.plane.least[i] <= self.plane.most[i] <= box.skew_max
        )

    def best(self) -> list[Part]:
        """The parts that gain most, less a margin for each of them."""
        parts = self._cut(Part(tuple(range(len(self.plane.means)))), DEPTH)
        return settled(parts, self.plane, self.evidence, lambda part: self.pick(part.cells)[0])

    def faster(self, new: list[Part], old: list[Part], old_names: list[str]) -> bool:
        """Whether what `new` picks is clearly faster than the stored choices, on average over the cells."""
        was, now = {}, {}
        for part, name in zip(old, old_names, strict=True):
            was.update(dict.fromkeys(part.cells, decide_cells(self.evidence, part.cells, self.rule, name).candidate))
        for part in new:
            now.update(dict.fromkeys(part.cells, self.pick(part.cells)[0]))
        row, log_step, cells = self.evidence.candidates.index, self.evidence.log_step, list(now)
        gains = np.array([median_of_rounds(log_step[row(now[c]), c] - log_step[row(was[c]), c]) for c in cells])
        known, weights = np.isfinite(gains), self.evidence.planned[cells]
        mean = float(np.average(gains[known], weights=weights[known])) if known.any() else 0.0
        return mean <= -over_stored(self.evidence.delta(cells, self.rule), self.rule)

    def bounds(self, part: Part) -> Bounds:
        """Cuts bound a part; where there is none, its own outermost cells."""
        means = [self.plane.means[i] for i in part.cells]
        ends = (
            (min(means), min(self.plane.least[i] for i in part.cells)),
            (max(means), max(self.plane.most[i] for i in part.cells)),
        )
        (mean_min, mean_max), (skew_min, skew_max) = (
            (ends[0][axis] if low is None else low, ends[1][axis] if high is None else high)
            for axis, (low, high) in enumerate(zip(part.low, part.high, strict=True))
        )
        return (mean_min, mean_max), (skew_min, skew_max)

    def _cut(self, part: Part, depth: int) -> list[Part]:
        """The part, or what it is best cut into."""
        least = BOX_MARGIN * float(self.evidence.planned.sum())
        best, lowest = [part], self.pick(part.cells)[1]
        for parts in self._partitions(part) if depth else ():
            cost = sum(self.pick(p.cells)[1] for p in parts) + least * (len(parts) - 1)
            if cost < lowest:
                best, lowest = parts, cost
        return best if len(best) == 1 else [finer for p in best for finer in self._cut(p, depth - 1)]

    def _partitions(self, part: Part) -> Iterator[list[Part]]:
        """Every cut into two, and into three."""
        for two in self._cuts(part):
            yield list(two)
            for i in (0, 1):
                yield from ([*three, two[1 - i]] for three in self._cuts(two[i]))

    def _cuts(self, part: Part) -> Iterator[tuple[Part, Part]]:
        """Every straight cut in two, at the geometric midpoint of neighbouring cells."""
        means = sorted({self.plane.means[i] for i in part.cells})
        for middle in (math.isqrt(a * b) for a, b in pairwise(means)):
            yield self._two(part, 0, middle)
        end = 0
        for least, most in sorted((self.plane.least[i], self.plane.most[i]) for i in part.cells):
            if 0 < end < least:  # no batch between
                yield self._two(part, 1, math.isqrt(end * least))
            end = max(end, most)

    def _two(self, part: Part, axis: int, middle: int) -> tuple[Part, Part]:
        at = (self.plane.means, self.plane.most)[axis]
        return (
            Part(tuple(i for i in part.cells if at[i] <= middle), part.low, with_end(part.high, axis, middle)),
            Part(tuple(i for i in part.cells if at[i] > middle), with_end(part.low, axis, middle + 1), part.high),
        )
