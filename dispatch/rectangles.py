"""The rectangles of a part of the (mean KV, skew) plane in which one candidate may win, those that gain most first.

Pure; needs numpy alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dispatch.decision import Rule
from dispatch.evidence import Evidence, Floats, within_limit
from dispatch.held import held
from dispatch.part import Part
from dispatch.plane import Plane
from dispatch.samples import TWIN


@dataclass(frozen=True)
class Rectangle:
    """`gain`: what the candidate that gains most there may save, as a sum of log time over rounds.

    `rest`: what is left of the part around it: at lower and higher means, then at lower and higher skews.
    """

    gain: float
    part: Part
    rest: tuple[Part, ...]


class Rectangles:
    """What every cell says of every candidate, once for all searches of a bucket."""

    def __init__(self, evidence: Evidence, plane: Plane, rule: Rule) -> None:
        self.plane, self.threshold = plane, rule.threshold
        self.planned = evidence.planned.astype(float)
        self.limits, self.ends = evidence.limits[:, None], np.stack([evidence.mean_range[1], evidence.skew_range[1]])
        self.may_win = _may_win(evidence, rule)
        self.sums: Floats = np.nan_to_num(evidence.medians) * self.planned

    def within(self, part: Part, least: float, over: int = 0) -> list[Rectangle]:
        """Those that may gain `least` at least over a candidate (its row; 0 is the default): some bins of mean KV that
        follow one another, and there of skew."""
        found: list[Rectangle] = []
        columns = sorted({self.plane.mean_bin[i] for i in part.cells})
        for n, first in enumerate(columns):
            for last in columns[n:]:
                strip, beside = self._inner(part, 0, first, last, columns)
                rows = sorted({self.plane.skew_bin[i] for i in strip.cells})
                for gain, low, high in self._ranges(strip, rows, least, over):
                    inner, around = self._inner(strip, 1, low, high, rows)
                    found.append(Rectangle(gain, inner, beside + around))
        return sorted(found, key=lambda rectangle: -rectangle.gain)

    def _inner(self, part: Part, axis: int, first: int, last: int, here: list[int]) -> tuple[Part, tuple[Part, ...]]:
        """The part from one bin of an axis to another, and what is below and above; `here`: bins that it has."""
        rest = []
        if first > here[0]:
            below, part = self.plane.cut(part, axis, here[here.index(first) - 1])
            rest.append(below)
        if last < here[-1]:
            part, above = self.plane.cut(part, axis, last)
            rest.append(above)
        return part, tuple(rest)

    def _ranges(self, strip: Part, rows: list[int], least: float, over: int) -> Iterator[tuple[float, int, int]]:
        """Gains from one of these bins of skew to another, both inclusive."""
        cells = np.array(sorted(strip.cells, key=lambda i: self.plane.skew_bin[i]))
        starts = np.searchsorted([self.plane.skew_bin[i] for i in cells], rows)
        weight = np.add.reduceat(self.planned[cells], starts)
        sums = np.add.reduceat(self.sums[:, cells], starts, axis=1)
        wins = np.logical_and.reduceat(self.may_win[:, cells], starts, axis=1)
        ends = np.maximum.reduceat(self.ends[:, cells], starts, axis=1)
        for k, low in enumerate(rows):
            total, share = sums[:, k:].cumsum(axis=1), weight[k:].cumsum()
            eligible = np.logical_and.accumulate(wins[:, k:], axis=1) & (total <= -self.threshold * share)
            eligible &= within_limit(self.limits, *np.maximum.accumulate(ends[:, k:], axis=1))
            gains = np.where(eligible, total[over] - total, 0.0).max(axis=0)
            for n in np.flatnonzero(gains >= least).tolist():
                yield float(gains[n]), low, rows[k + n]


def _may_win(evidence: Evidence, rule: Rule) -> NDArray[np.bool_]:
    """[candidate, cell]: whether a box with the cell may be the candidate's, as far as its bins alone can say."""
    every = range(len(evidence.pair))
    may = np.array([held(evidence, i, every, evidence.pair, rule).in_cell for i in range(len(evidence.candidates))])
    may &= evidence.corners <= rule.tie
    needed = np.maximum(1, evidence.planned * rule.min_rounds // evidence.r.shape[2])
    may &= evidence.rounds >= needed
    for e in evidence.exclusions:
        may[evidence.candidates.index(e.candidate), slice(None) if e.cell is None else e.cell] = False
    may[[0, evidence.candidates.index(TWIN)]] = False
    return may
