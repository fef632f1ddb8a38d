"""How slow a candidate may be where few rounds lie. Pure; needs numpy alone.

A kernel's time over the default's changes with mean and skew, and may do so by a third from one end of a bin to the
other. Where a pair of bins has few rounds, a plane through those in it and around it (local linear regression with
tricube weights: Cleveland, Robust Locally Weighted Regression, JASA 74, 1979) tells what they alone do not: how slow
it is in the pair's slowest corner; beside the default at its best, since the default may be slow there by chance. Where
there are more, they tell it themselves; and a kernel may change at the border of a bin, which a plane does not see.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dispatch.bins import RATIO
from dispatch.candidate import Candidate
from dispatch.samples import EVEN, TWIN

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

REACH = 1.5  # bins from a bin's middle, as far as rounds count
MANY = 5  # rounds of a pair of bins, which are asked themselves
FEW = 6  # rounds, of which a plane says nothing
FLAT = 0.01  # of the weight, added to the variances in bins: rounds side by side have no slope


def in_bins(means: Ints, skews: Ints) -> tuple[Floats, Floats]:
    """Where rounds lie, so that each bin has a width of 1 and begins and ends at whole numbers."""
    return 2 * np.log2(np.maximum(means, 1)), np.log(np.maximum(skews, EVEN) / EVEN) / math.log(RATIO)


def worst_corners(r: Floats, means: Ints, skews: Ints, last_mean: Ints, skew_bin: Ints) -> Floats:
    """What r would be in the slowest corner of each cell's pair of bins, [candidate, cell].

    `r`: [candidate, cell, round], NaN where there is none. `means`, `skews`: [cell, round], 0 where a round is not the
    cell's. `last_mean`, `skew_bin`: of each cell's bins, the largest mean and the index. -inf where the pair has many
    rounds, and where too few lie around.
    """
    own = means > 0
    here = (last_mean == last_mean[:, None]) & (skew_bin == skew_bin[:, None])
    asked = np.flatnonzero(here @ own.sum(axis=1) < MANY)
    x, y = (at[own] for at in in_bins(means, skews))
    middle_x, middle_y = np.ceil(2 * np.log2(last_mean[asked])) - 0.5, skew_bin[asked] + 0.5
    distance = np.hypot(x - middle_x[:, None], y - middle_y[:, None]) / REACH
    weights = np.clip(1 - np.minimum(distance, 1) ** 3, 0, 1) ** 3  # [asked cell, round of any cell]
    corners = np.full(r.shape[:2], -np.inf)
    for candidate, of_rounds in enumerate(r[:, own]):
        valid = np.isfinite(of_rounds)
        w, dx, dy = weights[:, valid], x[valid] - middle_x[:, None], y[valid] - middle_y[:, None]
        basis = np.stack([np.ones_like(dx), dx, dy], axis=-1)
        weighted = w[..., None] * basis
        products = np.einsum("cni,cnj->cij", weighted, basis)
        products[:, (1, 2), (1, 2)] += FLAT * products[:, :1, 0]
        enough = (w > 0).sum(axis=1) >= FEW
        sums = np.einsum("cni,n->ci", weighted, of_rounds[valid])
        plane = np.linalg.solve(products[enough], sums[enough][..., None])[..., 0]
        corners[candidate, asked[enough]] = plane[:, 0] + np.abs(plane[:, 1:]).sum(axis=1) / 2
    return corners


def over_default_at_its_best(candidates: Sequence[str], log_step: Floats) -> Floats:
    """Log of the step's time over that of the default with the best of its tactics, [candidate, cell, round].

    Of a tactic of the default's, over the default. FA3 takes up to 1.4 times as long where its tiles overfill a wave by
    one or two, which mean and skew do not tell; another kernel that is fast beside it there is not so next to there.
    """
    own = tactics_of_default(candidates)
    over: Floats = log_step - np.fmin.reduce(log_step[own])
    over[own] = log_step[own] - log_step[0]
    return over


def tactics_of_default(candidates: Sequence[str]) -> NDArray[np.bool_]:
    """Which of the candidates are the default, the first of them, or its backend with another tactic; not its twin."""
    default = Candidate.parse(candidates[0]).backend
    return np.array([name != TWIN and Candidate.parse(name).backend == default for name in candidates])
