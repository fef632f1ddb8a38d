"""Where a cut in mean KV lies between two points that were measured: where both sides are equally fast.

A cut begins in the middle. Where a winner gains little on its side and would lose much on the other, it is not faster
as far as the middle. Pure; needs numpy alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dispatch.evidence import Evidence, Floats
from dispatch.part import Part, with_end

MEAN = 0  # the axis


@dataclass(frozen=True)
class Plane:
    """Of each cell: its mean KV, and its least and its largest skew."""

    means: Sequence[int]
    least: Sequence[int]
    most: Sequence[int]


def settled(parts: Sequence[Part], plane: Plane, evidence: Evidence, pick: Callable[[Part], str]) -> list[Part]:
    """The same parts, each cut in mean KV moved to where a winner beside the default is as fast as the default.

    Straight lines in the logarithms of length and time. A cut stays where winners lie on both of its sides, and where
    the winner would not lose on the other.
    """
    moved, default = list(parts), evidence.candidates[0]
    for cut in sorted({part.high[MEAN] or 0 for part in parts} - {0}):
        below = [part for part in parts if part.high[MEAN] == cut]
        above = [part for part in parts if part.low[MEAN] == cut + 1]
        ends: dict[bool, list[int]] = {True: [], False: []}  # of winners below the cut, and above it
        for a in below:
            for b in above:
                names = pick(a), pick(b)
                if (names[0] == default) != (names[1] == default):
                    is_below = names[1] == default
                    near, far, name = (a, b, names[0]) if is_below else (b, a, names[1])
                    r = evidence.medians[evidence.candidates.index(name)]
                    ends[is_below] += _crossing(near, far, plane, r)
        if bool(ends[True]) == bool(ends[False]):
            continue
        to = min(ends[True]) if ends[True] else max(ends[False])
        # A strip of skews may have no cells at the border, and its crossing lie beyond those of another strip.
        lowest = max(plane.means[i] for part in below for i in part.cells)
        highest = min(plane.means[i] for part in above for i in part.cells)
        to = min(max(to, lowest), highest - 1)
        moved = [
            replace(
                new,
                low=with_end(new.low, MEAN, to + 1) if old.low[MEAN] == cut + 1 else new.low,
                high=with_end(new.high, MEAN, to) if old.high[MEAN] == cut else new.high,
            )
            for old, new in zip(parts, moved, strict=True)
        ]
    return moved


def _crossing(near: Part, far: Part, plane: Plane, r: Floats) -> list[int]:
    """The last mean KV on the lower side of where the winner of `near` is as fast as the default, on the way to `far`.

    r: of the winner in each cell, the log of its time over the default's. Of the cells at the border that have skews in
    common, the least gain and the largest loss count. Nothing where there are none, or it does not lose in `far`.
    """
    upwards = plane.means[near.cells[0]] < plane.means[far.cells[0]]
    mine, theirs = (
        [i for i in part.cells if plane.means[i] == edge(plane.means[j] for j in part.cells)]
        for part, edge in ((near, max if upwards else min), (far, min if upwards else max))
    )
    low = max(min(plane.least[i] for i in cells) for cells in (mine, theirs))
    high = min(max(plane.most[i] for i in cells) for cells in (mine, theirs))
    gain, loss = (
        max((r[i] for i in cells if plane.most[i] >= low and plane.least[i] <= high and np.isfinite(r[i])), default=0.0)
        for cells in (mine, theirs)
    )
    if not gain < 0 < loss:
        return []
    start, end = np.log(plane.means[mine[0]]), np.log(plane.means[theirs[0]])
    at = float(np.exp(start + (end - start) * gain / (gain - loss)))
    return [int(np.floor(at)) if upwards else int(np.ceil(at)) - 1]
