"""What a decision says: the candidate, the rule that decided, and what every other one lost by."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Reason(str, enum.Enum):
    """Why a candidate was chosen, or was not. The value is the text that a person reads."""

    FASTEST = "fastest"
    PRIORITY = "within the margin of the fastest, and first in priority"
    INCUMBENT = "the stored choice: no other is faster than it by delta"
    NOT_FASTER = "not faster than the default by delta"
    INCONSISTENT = "slower than the default in a cell, or in too many rounds"
    BEATEN = "faster than the default, but another was chosen"
    LOWER_PRIORITY = "within the margin of the fastest, and later in priority"
    UNCONFIRMED = "chosen on all rounds, and no gain where each half of them chooses for the other"
    TOO_FEW_ROUNDS = "too few valid rounds"
    DROPPED = "far slower than the default in a cell, in each of the first rounds"
    GATE_FAILED = "wrong numbers"
    FAILED = "failed while it was built or measured"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True)
class Rule:
    """The numbers of the deciding rule. Logarithms of time ratios: 0.03 is 3%.

    threshold: the least gain over the default (raised to twice the A/A spread where that is larger).
    cluster_margin: candidates so close to the fastest count as equal, and priority decides.
    min_rounds: a cell with fewer valid rounds says nothing (12 of 15: an outlier a cell may be lost).
    win_share: the share of rounds that must be won; 0.8 of 15 by luck alone has a probability of 2%.
    cell_win_share: the share of rounds that must be won in each cell. Lengths are new in each round, so a ragged cell
    may be a mixture of gains and losses. On the samples in smoke/results/h200, 2/3 leaves 11 of 1379 cells slower where
    half of the rounds decides and the other half judges, the median alone 38 of 1575, for 0.1% to 0.3% of mean gain.
    """

    threshold: float = 0.03
    cluster_margin: float = 0.01
    min_rounds: int = 12
    win_share: float = 0.8
    cell_win_share: float = 2 / 3


@dataclass(frozen=True, slots=True)
class Verdict:
    """One candidate in one box. r is the log of its step time over the default's, paired by round.

    `mean_r`: mean over the box's cells of the median r. `worst_r`, `worst_cell`: the largest of those medians
    and its index among the bucket's cells. `win_share`: rounds whose mean r is below 0. None: not measured.
    """

    candidate: str
    reason: Reason
    mean_r: float | None = None
    worst_r: float | None = None
    worst_cell: int | None = None
    win_share: float | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """The choice for one box, and why. A decision for the default carries the reason of the closest loser."""

    candidate: str
    reason: Reason
    delta: float
    aa_spread: float
    verdicts: tuple[Verdict, ...]
