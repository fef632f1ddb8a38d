"""Cutting a bucket's (mean KV, skew) plane into the boxes that gain most. Pure; needs numpy alone."""

from __future__ import annotations

from itertools import islice

import numpy as np

from dispatch.confirm import decide_cells
from dispatch.decision import Rule
from dispatch.evidence import Evidence, median_of_rounds
from dispatch.part import Part
from dispatch.plane import Plane
from dispatch.rectangles import Rectangles
from dispatch.samples import Box
from dispatch.selector import over_stored

BOX_MARGIN = 0.003  # what one more box must gain, on average over the bucket's batches
TRIES = 64  # of rectangles that each cell speaks for, until all cells of one speak for it together


class Search:
    """Decides sets of cells, each once, for the many partitions that share them."""

    def __init__(self, evidence: Evidence, plane: Plane, rule: Rule) -> None:
        """`plane`: where the evidence's cells lie."""
        self.evidence, self.plane, self.rule = evidence, plane, rule
        self.rectangles = Rectangles(evidence, self.plane, rule)
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
        (first, last), (least, most) = self.evidence.mean_range, self.evidence.skew_range
        within = (box.mean_kv_min <= first) & (last <= box.mean_kv_max)
        within &= (box.skew_min <= least) & (most <= box.skew_max)
        return tuple(np.flatnonzero(within).tolist())

    def best(self) -> list[Part]:
        """The rectangles that gain most, the largest gain first, and what is left around them."""
        least = BOX_MARGIN * float(self.evidence.planned.sum())
        return self._carved(Part(tuple(range(len(self.plane.mean_bin)))), least)

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

    def _carved(self, part: Part, least: float) -> list[Part]:
        """The rectangle that gains most, and what is left around it, carved further."""
        for rectangle in islice(self.rectangles.within(part, least), TRIES):
            if self.pick(rectangle.part.cells)[1] <= -least:
                rest = [piece for its in rectangle.rest for piece in self._carved(its, least)]
                return self._refined(rectangle.part, least) + rest
        return [part]

    def _refined(self, part: Part, least: float) -> list[Part]:
        """A part, or what it is cut into where another candidate is still faster than its own."""
        name, cost = self.pick(part.cells)
        over = self.evidence.candidates.index(name)
        for rectangle in islice(self.rectangles.within(part, least, over), TRIES):
            pieces = (rectangle.part, *rectangle.rest)
            if sum(self.pick(piece.cells)[1] for piece in pieces) <= cost - least:
                return [finer for piece in pieces for finer in self._refined(piece, least)]
        return [part]
