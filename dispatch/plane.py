"""The plane that a plan divides: mean KV, and skew. Pure; needs numpy alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dispatch import bins
from dispatch.bins import Bins, Range
from dispatch.evidence import Evidence
from dispatch.part import Part


@dataclass(frozen=True)
class Plane:
    """Of each cell of the evidence: its bins, and the least and the largest skew of its rounds."""

    bins: Bins
    mean_bin: Sequence[int]
    skew_bin: Sequence[int]
    least: Sequence[int]
    most: Sequence[int]

    @classmethod
    def of(cls, evidence: Evidence, grid: Bins) -> Plane:
        """`grid`: the bins of mean KV that the evidence's cells were split by."""
        return cls(grid, *(x.tolist() for x in (evidence.mean_bin, evidence.skew_bin, *evidence.skew_range)))

    def cut(self, part: Part, axis: int, last: int) -> tuple[Part, Part]:
        """What of a part lies in the bins up to `last` of an axis (mean, skew), and what lies behind them."""
        at = (self.mean_bin, self.skew_bin)[axis]
        _, end = self.bins.means(last) if axis == 0 else bins.skews(last)
        return part.cut(axis, end, [at[i] <= last for i in part.cells])

    def bounds(self, part: Part) -> tuple[Range, Range]:
        """Of mean KV and of skew: the part's own bins, as far as cuts go; where there is no cut, its outermost rounds.

        What lies between two parts and was not measured belongs to neither.
        """
        own = (
            [self.bins.means(self.mean_bin[i]) for i in part.cells],
            [bins.skews(self.skew_bin[i]) for i in part.cells],
        )
        rounds = (own[0], [(self.least[i], self.most[i]) for i in part.cells])
        (mean_min, mean_max), (skew_min, skew_max) = (
            (
                min(begin for begin, _ in rounds[axis])
                if low is None
                else max(low, min(begin for begin, _ in own[axis])),
                max(end for _, end in rounds[axis]) if high is None else min(high, max(end for _, end in own[axis])),
            )
            for axis, (low, high) in enumerate(zip(part.low, part.high, strict=True))
        )
        return (mean_min, mean_max), (skew_min, skew_max)
