"""Which samples can change no decision any more. Pure; needs numpy alone.

A winner takes no more time than the default in most rounds of each pair of bins (Rule.cell_win_share). A candidate that
has lost more of a pair's rounds than a winner may serves no box with that pair, whatever follows. What its other
samples there would still tell: whether half of the rounds would have chosen it, in a box that another
candidate wins; and, a little better than those that it has lost, how slow it becomes towards there (slopes). A tactic
of the default also tells how fast the default may be there (Evidence.corners): it is timed as long as another backend
may win.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from dispatch.decision import Rule
from dispatch.evidence import Floats
from dispatch.held import beaten
from dispatch.samples import BucketSamples
from dispatch.slopes import tactics_of_default
from dispatch.subcells import Subcells, pairs_of

Bools = NDArray[np.bool_]


class Futility:
    """For one bucket, whose lengths are known before anything is timed."""

    def __init__(self, samples: BucketSamples, rule: Rule, stored: Collection[str] = ()) -> None:
        """`samples`: of the planned cells and lengths; times are not looked at.

        `stored`: the candidates of the bucket's stored boxes. They stay on weaker conditions, so they are timed to the
        end, and so is the default.
        """
        self.rule, self.has_stored = rule, bool(stored)
        parts = Subcells.of(samples)
        self.source, self.own = parts.source, parts.own
        self.pair = pairs_of(parts.mean_bin, parts.skew_bin)
        self.stays = np.array([[name in stored] for name in samples.candidates])
        self.tactics = tactics_of_default(samples.candidates)

    def skipped(self, r: Floats, gone: Bools) -> Bools:
        """The samples that need not be taken from now on, [candidate, cell, round]. Once skipped, always skipped.

        The default and its twin come first. `r`: log ratios to the default so far, [candidate, cell, round], NaN where
        there is none. `gone`: cells in which a candidate is not timed any more for another reason, [candidate, cell].
        """
        lost = (r[:, self.source] > self.rule.tie) & self.own
        all_of_them, even, odd = (
            self._beaten(lost[..., rounds].sum(axis=-1), self.own[:, rounds].sum(axis=-1))
            for rounds in (slice(None), slice(0, None, 2), slice(1, None, 2))
        )
        out = all_of_them | gone[:, self.source]
        may_win = ~out | self.stays
        idle = out & ((even & odd) | ~may_win[2:].any(axis=0)) & ~self.stays
        idle[self.tactics] &= ~may_win[~self.tactics][1:].any(axis=0)  # the first of the others is the default's twin
        skipped = np.zeros(r.shape, dtype=bool)
        for part, (cell, rounds) in enumerate(zip(self.source, self.own, strict=True)):
            skipped[2:, cell] |= idle[2:, part, None] & rounds
        if not self.has_stored:
            # A box with a part of a cell looks at the noise in all of the cell; but only where it may have a winner.
            decided = np.ones(r.shape[1], dtype=bool)
            np.logical_and.at(decided, self.source, out[2:].all(axis=0))
            skipped[:2] = decided[:, None] & (skipped[2:] | gone[2:, :, None]).all(axis=0)
        return skipped

    def _beaten(self, lost: NDArray[np.int64], planned: NDArray[np.int64]) -> Bools:
        """Of each part, whether its pair of bins cannot be won any more, [candidate, part]."""
        pairs = self.pair == np.arange(self.pair.max() + 1)[:, None]  # [pair, part]
        return beaten(lost @ pairs.T, pairs @ planned, self.rule)[:, self.pair]
