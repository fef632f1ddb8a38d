"""What an arm is not timed in any more, because it lost there in each of the first rounds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dispatch.bench.arm import Arm
from dispatch.decision import Reason
from dispatch.evidence import Floats
from dispatch.samples import Exclusion

# After so many rounds, an arm that lost a cell to the default in each of them by more than this is not timed there any
# more: no box with that cell could be its own.
DROPS = {2: float(np.log(1.5)), 5: float(np.log(1.10))}


def drop(arms: Sequence[Arm], r: Floats, log_ratio: float) -> list[Exclusion]:
    """Take from each arm the cells that it lost to the default by over `log_ratio` in every round so far.

    `r`: log ratios to the default, [row of the samples, cell, round], NaN where there is none.
    """
    out = []
    for arm in arms:
        ratio = r[arm.index]
        lost = (ratio > log_ratio) | np.isnan(ratio)  # some rounds may be too long for it
        for c in np.flatnonzero(lost.all(axis=1) & np.isfinite(ratio).any(axis=1)).tolist():
            if c not in arm.lost_cells:
                arm.lost_cells.add(c)
                detail = f"{np.exp(np.nanmedian(ratio[c])):.2f} times the default's time"
                out.append(Exclusion(arm.name, Reason.DROPPED, detail, c))
    return out
