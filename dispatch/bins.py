"""The bins of (mean KV, skew) that boxes are made of, and those of the longest request. Needs numpy alone.

Bins of mean KV end at powers of 2 and in the middle between them: kernels change what they do at powers of 2 (on an
H200, at batch 1, cuDNN's takes a fifth longer above 4096 tokens). Of what length tells is another matter: at batch 4
it is the longest request, above 1024 tokens, that costs cuDNN's an eighth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dispatch.samples import EVEN

Ints = NDArray[np.int64]
Range = tuple[int, int]
"""Both ends inclusive."""

RATIO = 1.25  # of the ends of a bin of skews
_SKEWS = np.array([int(EVEN * RATIO**k) for k in range(100)])  # where bins begin; the last one is above any skew


@dataclass(frozen=True)
class Bins:
    """Of mean KV: `first` is the least mean, `tops` the largest of each bin."""

    first: int
    tops: tuple[int, ...]

    @classmethod
    def of(cls, means: Ints) -> Bins:
        """From the least of these means to the largest: KV points, and what rounding and clipping made of them."""
        first, last = int(means.min()), int(means.max())
        tops = {math.isqrt(2**k) for k in range(2 * last.bit_length())}  # 2 is the root of 4 and, rounded, of 8
        return cls(first, (*sorted(top for top in tops if first < top < last), last))

    def of_means(self, means: ArrayLike) -> Ints:
        """The bin of each mean; one outside of all belongs to the nearest."""
        found: Ints = np.minimum(np.searchsorted(self.tops, means), len(self.tops) - 1)
        return found

    def means(self, index: int) -> Range:
        """What a bin holds."""
        return (self.tops[index - 1] + 1 if index else self.first), self.tops[index]


def of_skews(skews: ArrayLike) -> Ints:
    """The bin of each skew, which is at least EVEN."""
    found: Ints = np.searchsorted(_SKEWS, np.maximum(skews, EVEN), side="right") - 1
    return found


def of_longest(longest: ArrayLike) -> Ints:
    """The bin of each longest request, of 1 token or more: they end at powers of 2."""
    found: Ints = np.ceil(np.log2(np.maximum(longest, 1))).astype(np.int64)
    return found


def skews(index: int) -> Range:
    """What a bin of skews holds."""
    return int(_SKEWS[index]), int(_SKEWS[index + 1]) - 1
