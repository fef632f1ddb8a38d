"""What the rule's plan gains over FA3, and how often it would be wrong. Pure; needs numpy alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from dispatch.regimes import decide
from dispatch.samples import Samples
from dispatch.selector import Evidence

HALF_ROUNDS = 6  # valid ones that a cell must have of the 7 or 8 of a half


@dataclass(frozen=True)
class Gains:
    """Of a plan's boxes, those of another candidate than the default, and their cross-fitted speedups.

    `mean_of_cells`, `slower_cells`: speed over the default in all cells, and those below 1, on the rounds that chose.
    """

    boxes: int
    other_boxes: int
    least: float
    median: float
    most: float
    cells: int
    mean_of_cells: float
    slower_cells: int


@dataclass(frozen=True)
class HeldOut:
    """Cells of other candidates than the default, where half of the rounds decides and the other half scores.

    `worst`: the log of time over the default's in the worst one.
    """

    cells: int
    slower: int
    slower_by_2_percent: int
    worst: float


def gains(samples: Samples) -> Gains:
    """Of the plan that the rule makes of all rounds."""
    regimes = [regime for own in decide(samples).values() for regime in own]
    speedups = [r.speedup for r in regimes if r.decision.candidate != samples.default] or [1.0]
    logs = np.array([log for _, log in _served(samples, samples)])
    other = sum(r.decision.candidate != samples.default for r in regimes)
    return Gains(
        len(regimes),
        other,
        min(speedups),
        float(np.median(speedups)),
        max(speedups),
        len(logs),
        float(np.exp(-logs.mean())),
        int((logs > 0).sum()),
    )


def held_out(samples: Samples) -> HeldOut:
    """The even rounds decide and the odd ones score, then the other way round."""
    even, odd = (_of_rounds(samples, first) for first in (0, 1))
    served = [*_served(even, odd), *_served(odd, even)]
    logs = np.array([log for is_other, log in served if is_other])
    worst = float(logs.max()) if logs.size else 0.0
    return HeldOut(len(logs), int((logs > 0).sum()), int((logs > 0.02).sum()), worst)


def _of_rounds(samples: Samples, first: int) -> Samples:
    buckets = tuple(replace(b, times=b.times[..., first::2]) for b in samples.buckets)
    return replace(samples, rule=replace(samples.rule, min_rounds=HALF_ROUNDS), buckets=buckets)


def _served(decides: Samples, scores: Samples) -> Iterator[tuple[bool, float]]:
    """Of every cell: whether another than the default serves it, and the median log of its time over the default's."""
    regimes = decide(decides)
    for bucket in scores.buckets:
        evidence = Evidence.of(bucket, scores.num_layers, scores.priority)
        for regime in regimes[bucket.bucket]:
            name = regime.decision.candidate
            medians = evidence.medians[evidence.candidates.index(name), list(regime.cells)]
            yield from ((name != scores.default, float(m)) for m in np.nan_to_num(medians))
