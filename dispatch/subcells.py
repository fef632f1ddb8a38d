"""Cells as a plan sees them: rounds of another mean, skew or longest request are another cell. Needs numpy alone.

A cell is measured on new lengths in each round: their means lie around its point, and in a ragged cell the longest
request differs by a factor of two and more. A plan is asked by mean and skew: what is measured in one bin of them must
not speak for another. And a kernel may change where the longest request does, within bins of both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dispatch import bins
from dispatch.bins import Bins, Ints
from dispatch.samples import EVEN, BucketSamples, Cell, skews_of


@dataclass(frozen=True)
class Subcells:
    """The parts of a bucket's cells whose rounds lie in one bin, in the order of the cells.

    `source`: the index of the cell that each is of. `own`: which rounds are its own, [part, round]. `mean_bin`,
    `skew_bin`, `longest_bin`: where they lie.
    """

    bins: Bins
    source: Ints
    own: NDArray[np.bool_]
    mean_bin: Ints
    skew_bin: Ints
    longest_bin: Ints

    @classmethod
    def of(cls, samples: BucketSamples) -> Subcells:
        """`samples`: of whole cells, with a round at least. Times are not looked at."""
        points = np.array([cell.mean_kv for cell in samples.cells])
        grid = Bins.of(np.concatenate([points, samples.means[samples.longest > 0]]))
        of_round = np.stack(
            [grid.of_means(samples.means), bins.of_skews(skews_of(samples)), bins.of_longest(samples.longest)], axis=-1
        )
        source, own, where = [], [], []
        for c, planned in enumerate(samples.longest > 0):
            for its in np.unique(of_round[c][planned], axis=0):
                source.append(c)
                own.append(planned & (of_round[c] == its).all(axis=1))
                where.append(its)
        return cls(grid, np.array(source), np.array(own), *np.array(where).T)

    def split(self, samples: BucketSamples) -> BucketSamples:
        """The same samples, in these parts. Rounds that are not a part's have `longest` 0 and no times."""
        skews, own = skews_of(samples), self.own
        longest, means = (np.where(own, its[self.source], 0) for its in (samples.longest, samples.means))
        cells = [
            cell_of(round(float(np.median(m[mine]))), skews[c][mine], samples.cells[c].profile)
            for c, m, mine in zip(self.source, means, own, strict=True)
        ]
        exclusions = tuple(
            replace(e, cell=None if e.cell is None else i)
            for e in samples.exclusions
            for i in ([0] if e.cell is None else np.flatnonzero(self.source == e.cell).tolist())
        )
        times = np.where(own, samples.times[:, :, self.source], np.nan)
        return replace(samples, cells=tuple(cells), longest=longest, means=means, times=times, exclusions=exclusions)


def pairs_of(mean_bin: Ints, skew_bin: Ints) -> Ints:
    """A number for each pair of bins, from 0: parts of one are alike for a plan, whichever profile they are of."""
    numbers: Ints = np.unique(mean_bin * 1000 + skew_bin, return_inverse=True)[1]
    return numbers


def cell_of(mean_kv: int, skews: NDArray[np.int64], profile: str) -> Cell:
    """A cell whose rounds have these skews."""
    return Cell(mean_kv, max(mean_kv, round(float(np.median(skews)) * mean_kv / EVEN)), profile)
