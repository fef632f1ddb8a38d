"""Evidence: a bucket's samples, prepared for the deciding rule. Pure; needs numpy alone.

Every comparison is r = log(t candidate) - log(t default) of the same round, so that drift cancels.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dispatch.candidate import Candidate
from dispatch.decision import Rule
from dispatch.samples import EVEN, TWIN, BucketSamples, Exclusion, log_of_times, skews_in, skews_of
from dispatch.slopes import over_default_at_its_best, worst_corners
from dispatch.subcells import Subcells, pairs_of

Floats = NDArray[np.float64]
NORMAL = 1.4826  # standard deviation over the median absolute value, of a normal distribution around 0


@dataclass(frozen=True)
class Evidence:
    """A bucket's samples, prepared once for the many boxes that a partition tries.

    `log_step` is [candidate, cell, round]; row 0 is the default. `longest` and `means` are [cell, round], 0 where a
    round is not the cell's. `source`: of each cell, the number of the one that it is part of; `mean_bin`, `skew_bin`:
    where it lies (Subcells), and `longest_bin`. `corners`: how slow each would be beside the default at its best in
    the slowest corner of the bins of mean and skew, [candidate, cell], as all rounds tell (slopes). `priority` lists
    backends, best first.
    """

    candidates: tuple[str, ...]
    log_step: Floats
    longest: NDArray[np.int64]
    means: NDArray[np.int64]
    source: NDArray[np.int64]
    mean_bin: NDArray[np.int64]
    skew_bin: NDArray[np.int64]
    longest_bin: NDArray[np.int64]
    corners: Floats
    priority: tuple[str, ...]
    exclusions: tuple[Exclusion, ...] = ()

    @classmethod
    def of(cls, samples: BucketSamples, parts: Subcells, num_layers: int, priority: Sequence[str]) -> Evidence:
        """From raw samples in these parts of cells."""
        log_step = log_of_times(samples.step_us(num_layers))
        return cls(
            samples.candidates,
            log_step,
            samples.longest,
            samples.means,
            parts.source,
            parts.mean_bin,
            parts.skew_bin,
            parts.longest_bin,
            worst_corners(
                over_default_at_its_best(samples.candidates, log_step),
                samples.means,
                skews_of(samples),
                np.array([parts.bins.means(index)[1] for index in parts.mean_bin]),
                parts.skew_bin,
            ),
            tuple(priority),
            samples.exclusions,
        )

    @cached_property
    def pair(self) -> NDArray[np.int64]:
        """A number for each pair of bins, [cell]."""
        return pairs_of(self.mean_bin, self.skew_bin)

    @property
    def twin(self) -> int:
        """The row of the default's twin."""
        return self.candidates.index(TWIN)

    @cached_property
    def planned(self) -> NDArray[np.int64]:
        """Rounds of each cell, whether they were measured or not."""
        count: NDArray[np.int64] = (self.longest > 0).sum(axis=1)
        return count

    @cached_property
    def r(self) -> Floats:
        """Paired log ratio to the default, [candidate, cell, round]."""
        ratio: Floats = self.log_step - self.log_step[0]
        return ratio

    @cached_property
    def mean_range(self) -> NDArray[np.int64]:
        """The least and the largest mean of each cell's rounds, [2, cell]."""
        return self._range(self.means)

    @cached_property
    def skew_range(self) -> NDArray[np.int64]:
        """The least and the largest skew of each cell's rounds, [2, cell]."""
        return self._range(skews_in(self.longest, self.means))

    def _range(self, of_rounds: NDArray[np.int64]) -> NDArray[np.int64]:
        own = self.longest > 0
        least = np.where(own, of_rounds, of_rounds.max()).min(axis=1)
        return np.stack([least, np.where(own, of_rounds, 0).max(axis=1)])

    @cached_property
    def limits(self) -> Floats:
        """The longest request that each candidate was built for; infinite where it serves any, [candidate]."""
        built_for = (None if name == TWIN else Candidate.parse(name).max_kv for name in self.candidates)
        return np.array([np.inf if limit is None else limit for limit in built_for])

    @cached_property
    def rounds(self) -> NDArray[np.int64]:
        """Valid rounds, [candidate, cell]."""
        valid: NDArray[np.int64] = np.isfinite(self.r).sum(axis=2)
        return valid

    @cached_property
    def medians(self) -> Floats:
        """Median over rounds of r, [candidate, cell]; NaN without a valid round."""
        return median_of_rounds(self.r)

    @cached_property
    def aa_spread(self) -> Floats:
        """|median r| of the default's twin around each cell; where it was not measured, nothing can clear the noise."""
        spread: Floats = np.abs(np.nan_to_num(median_of_rounds(self._twin), nan=np.inf))
        return spread[self.source]

    @cached_property
    def noise(self) -> Floats:
        """Standard deviation of the twin's r around each cell, as its median absolute value tells it, [cell]."""
        deviation: Floats = NORMAL * np.nan_to_num(median_of_rounds(np.abs(self._twin)), nan=np.inf)
        return deviation[self.source]

    @cached_property
    def _twin(self) -> Floats:
        """The twin's r of each source, [source, round]: a source's rounds are in one of its cells each."""
        r = self.r[self.twin]
        whole = np.full((int(self.source.max()) + 1, r.shape[1]), np.nan)
        for cell, number in enumerate(self.source):
            whole[number] = np.where(np.isnan(r[cell]), whole[number], r[cell])
        return whole

    @cached_property
    def ranks(self) -> dict[str, int]:
        """Position in priority order of each candidate; tactics in the order in which the backend lists them."""
        known = {name: i for i, name in enumerate(self.priority)}
        order = sorted(
            self.candidates, key=lambda c: known.get(Candidate.parse(c).backend, len(known)) if c != TWIN else 0
        )
        return {name: i for i, name in enumerate(order)}

    @cached_property
    def halves(self) -> tuple[Evidence, Evidence]:
        """The same with the even rounds alone, and with the odd ones."""
        even, odd = (
            replace(
                self,
                log_step=self.log_step[:, :, first::2],
                longest=self.longest[:, first::2],
                means=self.means[:, first::2],
            )
            for first in (0, 1)
        )
        return even, odd

    def delta(self, cells: Sequence[int], rule: Rule) -> float:
        """The gain that a decision over these cells must clear."""
        return max(rule.threshold, 2 * float(self.aa_spread[list(cells)].max()))


def within_limit(limit: ArrayLike, mean: ArrayLike, skew: ArrayLike) -> NDArray[np.bool_]:
    """Whether no request of a batch of at most this mean and skew is longer: a skew is rounded down."""
    within: NDArray[np.bool_] = np.asarray(mean) * (np.asarray(skew) + 1) <= EVEN * (np.asarray(limit) + 1)
    return within


def median_of_rounds(r: Floats) -> Floats:
    """Median over the last axis without the NaN; NaN where nothing is left."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # "All-NaN slice": that is a value here
        median: Floats = np.nanmedian(r, axis=-1)
    return median
