"""Cells as a plan sees them: rounds of another skew are another cell. Needs numpy alone.

A cell is measured on new lengths in each round, and in a ragged one the longest of them differs by a factor of two and
more. A plan is asked by the longest over the mean: what is measured at one must not speak for another.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dispatch.samples import BucketSamples, Cell

BIN = 1.25  # ratio of the ends of a bin of skews


def split(samples: BucketSamples) -> BucketSamples:
    """The same samples in cells whose rounds have their skew in one bin.

    Rounds of a cell that are not its own have `longest` 0 and no times. Splitting twice changes nothing.
    """
    means = np.array([cell.mean_kv for cell in samples.cells])[:, None]
    bins = np.floor(np.log(np.maximum(samples.longest / means, 1)) / np.log(BIN))
    source, own = [], []
    for c, longest in enumerate(samples.longest):
        for one in np.unique(bins[c][longest > 0]):
            source.append(c)
            own.append((bins[c] == one) & (longest > 0))
    mask = np.array(own)
    longest = np.where(mask, samples.longest[source], 0)
    cells = tuple(
        Cell(samples.cells[c].mean_kv, round(float(np.median(mine[mine > 0]))), samples.cells[c].profile)
        for c, mine in zip(source, longest, strict=True)
    )
    exclusions = tuple(
        replace(e, cell=None if e.cell is None else i)
        for e in samples.exclusions
        for i in ([0] if e.cell is None else [i for i, c in enumerate(source) if c == e.cell])
    )
    times = np.where(mask, samples.times[:, :, source], np.nan)
    return replace(samples, cells=cells, longest=longest, times=times, exclusions=exclusions)
