"""The rectangles of a part of the (mean KV, skew) plane in which one candidate may win, those that gain most first.

Pure; needs numpy alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dispatch.decision import Rule
from dispatch.evidence import Evidence, Floats, within_limit
from dispatch.held import held
from dispatch.part import Part
from dispatch.plane import Plane
from dispatch.samples import TWIN

T = TypeVar("T", bound=np.generic)


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
        self.limits = evidence.limits[:, None, None]
        self.ends = np.stack([evidence.mean_range[1], evidence.skew_range[1]])
        self.may_win = _may_win(evidence, rule)
        self.sums: Floats = np.nan_to_num(evidence.medians) * self.planned

    def within(self, part: Part, least: float, over: int = 0) -> Iterator[Rectangle]:
        """Those that may gain `least` at least over a candidate (its row; 0 is the default), the largest gain first:
        some bins of mean KV that follow one another, and there of skew."""
        columns = sorted({self.plane.mean_bin[i] for i in part.cells})
        for gain, first, last, low, high in self._gains(part, least, over):
            strip, beside = self._inner(part, 0, first, last, columns)
            rows = sorted({self.plane.skew_bin[i] for i in strip.cells})
            inner, around = self._inner(strip, 1, low, high, rows)
            yield Rectangle(gain, inner, beside + around)

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

    def _gains(self, part: Part, least: float, over: int) -> list[tuple[float, int, int, int, int]]:
        """The gain of each rectangle, its first and last bin of mean KV, and its first and last bin of skew."""
        cells = list(part.cells)
        (columns, c), (rows, k) = (
            np.unique(np.asarray(bins)[cells], return_inverse=True)
            for bins in (self.plane.mean_bin, self.plane.skew_bin)
        )

        def by_bins(combine: np.ufunc, nothing: int, of_cells: NDArray[T]) -> NDArray[T]:
            """What a part's cells have, [..., cell], of each pair of its bins, [..., mean KV, skew]."""
            pairs = np.full((len(columns), len(rows), *of_cells.shape[:-1]), nothing, dtype=of_cells.dtype)
            combine.at(pairs, (c, k), np.moveaxis(of_cells[..., cells], -1, 0))
            return np.ascontiguousarray(np.moveaxis(pairs, (0, 1), (-2, -1)))

        planned, sums = by_bins(np.add, 0, self.planned), by_bins(np.add, 0, self.sums)
        wins, ends = by_bins(np.logical_and, True, self.may_win), by_bins(np.maximum, 0, self.ends)
        found = []
        for i, first in enumerate(columns.tolist()):
            weight, totals = planned[i:].cumsum(axis=0), sums[:, i:].cumsum(axis=1)
            all_win = np.logical_and.accumulate(wins[:, i:], axis=1)
            last_ends = np.maximum.accumulate(ends[:, i:], axis=1)
            for j, low in enumerate(rows.tolist()):  # from here on, axes: the last bin of mean KV, the last of skew
                total, share = totals[:, :, j:].cumsum(axis=2), weight[:, j:].cumsum(axis=1)
                eligible = np.logical_and.accumulate(all_win[:, :, j:], axis=2) & (total <= -self.threshold * share)
                eligible &= within_limit(self.limits, *np.maximum.accumulate(last_ends[:, :, j:], axis=2))
                eligible &= (weight[:, j : j + 1] > 0) & (weight[:, j:] > 0)  # or a smaller one has all its cells
                gains = np.where(eligible, total[over] - total, 0.0).max(axis=0)
                for m, n in np.argwhere(gains >= least).tolist():
                    found.append((float(gains[m, n]), first, int(columns[i + m]), low, int(rows[j + n])))
        return sorted(found, key=lambda its: (-its[0], *its[1:]))


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
