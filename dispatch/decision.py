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
    LOSES_SOME = "much slower than the default for some of its batches"
    BEATEN = "faster than the default, but another was chosen"
    LOWER_PRIORITY = "within the margin of the fastest, and later in priority"
    UNCONFIRMED = "chosen on all rounds, and no gain where each half of them chooses for the other"
    TOO_FEW_ROUNDS = "too few valid rounds"
    HOPELESS = "slower than the default in too many rounds of a cell for the others to matter"
    DROPPED = "far slower than the default in a cell, in each of the first rounds"
    TOO_LONG = "built for shorter requests than some of these batches hold"
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
    tie: so much slower counts as equal, as one sample's noise is; a box may hold batches in which both are.
    cell_win_share: the share of rounds that must be won, or equal, in each pair of bins: lengths are new in each round,
    so even one may be a mixture of gains and losses. One of 7 may be lost, two of 14, three of 20.
    loss, lost_share: a batch is lost where it takes longer than the default by more than `loss` and three times the
    noise of its cell. Of a box's batches no more than this share may be lost (always three, and two
    of a cell, which may be outliers), and as many more as the default and its twin are so far apart in.
    """

    threshold: float = 0.03
    cluster_margin: float = 0.01
    min_rounds: int = 12
    win_share: float = 0.8
    tie: float = 0.01
    cell_win_share: float = 0.85
    loss: float = 0.02
    lost_share: float = 0.02


@dataclass(frozen=True, slots=True)
class Verdict:
    """One candidate in one box. r is the log of its step time over the default's, paired by round.

    `mean_r`: mean over the box's cells of the median r, by their rounds. `worst_r`, `worst_cell`: the largest median of
    r in a pair of bins, and a cell of it. `win_share`: rounds whose mean r is below 0. None: not measured.
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
