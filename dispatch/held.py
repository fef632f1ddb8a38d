"""Whether a candidate holds its ground everywhere in a box, and not only on average. Pure; needs numpy alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dispatch.decision import Rule
from dispatch.evidence import Evidence, Floats
from dispatch.subcells import pairs_of

FEW_ROUNDS = 3  # bins with fewer rounds are judged with the others of their box alone


@dataclass(frozen=True)
class Held:
    """Of some groups of a box's cells. `worst_r`: the largest median of r; `worst_cell`: a cell of that group.

    `in_cell`: whether the group of each cell is held: its median is at most a tie, and so are most of its rounds.
    """

    worst_r: float
    worst_cell: int
    in_cell: NDArray[np.bool_]


def held_everywhere(evidence: Evidence, candidate: int, cells: Sequence[int], rule: Rule) -> tuple[bool, Held]:
    """Whether it is held in each pair of bins, whichever profile its rounds are of; and, since in a corner of the plane
    a pair has few rounds, in each square of two by two pairs, and in each bin of mean and skew; and in each pair of
    bins of skew and of the longest request; and that no corner of a pair is slower, as far as the rounds around it
    tell. And how it is in the pairs.
    """
    m, s = evidence.mean_bin, evidence.skew_bin
    pairs = held(evidence, candidate, cells, evidence.pair, rule)
    squares = (pairs_of((m + right) // 2, (s + up) // 2) for right in (0, 1) for up in (0, 1))
    wider = (
        held(evidence, candidate, cells, groups, rule) for groups in (m, s, *squares, pairs_of(evidence.longest_bin, s))
    )
    corners = evidence.corners[candidate, list(cells)] <= rule.tie
    return bool(corners.all() and pairs.in_cell.all()) and all(its.in_cell.all() for its in wider), pairs


def held(evidence: Evidence, candidate: int, cells: Sequence[int], groups: NDArray[np.int64], rule: Rule) -> Held:
    """`candidate`: its row. `groups`: a number of each of the bucket's cells. A group without a valid round is not
    held."""
    cells = list(cells)
    r, planned = evidence.r[candidate, cells], evidence.planned[cells]
    _, group = np.unique(groups[cells], return_inverse=True)
    valid = np.isfinite(r)
    count = np.bincount(group, valid.sum(axis=1))
    enough = np.bincount(group, planned) >= FEW_ROUNDS
    enough = enough if enough.any() else np.ones_like(enough)
    medians = _medians(r[valid], np.repeat(group, r.shape[1])[valid.ravel()], len(count))
    share = np.bincount(group, (valid & (r <= rule.tie)).sum(axis=1)) / np.maximum(1, count)
    good = ~enough | ((medians <= rule.tie) & (share >= rule.cell_win_share))
    worst = int(np.where(enough & np.isfinite(medians), medians, -np.inf).argmax())
    return Held(float(medians[worst]), cells[int(np.flatnonzero(group == worst)[0])], (good & (count > 0))[group])


def beaten(lost: NDArray[np.int64], planned: NDArray[np.int64], rule: Rule) -> NDArray[np.bool_]:
    """Whether more of the planned rounds of a pair of bins are lost than a winner may lose, however the others go."""
    can_hold = (planned - lost) / np.maximum(planned, 1)
    never: NDArray[np.bool_] = (planned >= FEW_ROUNDS) & (can_hold < rule.cell_win_share)
    return never


def _medians(values: Floats, group: NDArray[np.int64], count: int) -> Floats:
    """Of each of `count` groups; NaN without a value."""
    ordered = values[np.lexsort((values, group))]
    sizes = np.bincount(group, minlength=count)
    first = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    low, high = first + (sizes - 1) // 2, first + sizes // 2
    last = max(0, len(ordered) - 1)
    middle = (ordered[np.clip(low, 0, last)] + ordered[np.clip(high, 0, last)]) / 2 if len(ordered) else np.zeros(count)
    medians: Floats = np.where(sizes > 0, middle, np.nan)
    return medians
