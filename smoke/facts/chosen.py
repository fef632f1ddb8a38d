"""What the rule's plan gains over FA3, and how often it would be wrong. Pure; needs numpy alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from dispatch.regimes import decide
from dispatch.samples import TWIN, Samples, log_of_times

HALF_ROUNDS = 6  # valid ones that a cell must have of the 7 or 8 of a half
SLOWER = float(np.log(1.03))


@dataclass(frozen=True)
class Gains:
    """Of a plan's boxes, those of another candidate than the default, and their cross-fitted speedups.

    `batches`, `mean`: of all that were timed, speed over the default on the rounds that chose.
    """

    boxes: int
    other_boxes: int
    least: float
    median: float
    most: float
    batches: int
    mean: float


@dataclass(frozen=True)
class HeldOut:
    """Batches that another candidate than the default serves, where half of the rounds decides and the other scores.

    `slower`: those over 3% slower than the default; `twin_slower`: as many are its own second run's, which is noise.
    `mean`: speed over the default of all batches, whoever serves them.
    """

    batches: int
    slower: int
    twin_slower: int
    mean: float


def gains(samples: Samples) -> Gains:
    """Of the plan that the rule makes of all rounds."""
    regimes = [regime for own in decide(samples).values() for regime in own]
    speedups = [r.speedup for r in regimes if r.decision.candidate != samples.default] or [1.0]
    logs = [log for _, log, _ in served(samples, samples)]
    other = sum(r.decision.candidate != samples.default for r in regimes)
    return Gains(
        len(regimes),
        other,
        min(speedups),
        float(np.median(speedups)),
        max(speedups),
        len(logs),
        float(np.exp(-np.mean(logs))),
    )


def held_out(samples: Samples) -> HeldOut:
    """The even rounds decide and the odd ones score, then the other way round."""
    even, odd = (_of_rounds(samples, first) for first in (0, 1))
    batches = [*served(even, odd), *served(odd, even)]
    others = [(log, twin) for is_other, log, twin in batches if is_other]
    slower, twin_slower = (sum(each[i] > SLOWER for each in others) for i in (0, 1))
    return HeldOut(len(others), slower, twin_slower, float(np.exp(-np.mean([log for _, log, _ in batches]))))


def _of_rounds(samples: Samples, first: int) -> Samples:
    buckets = tuple(
        replace(b, times=b.times[..., first::2], longest=b.longest[:, first::2], means=b.means[:, first::2])
        for b in samples.buckets
    )
    return replace(samples, rule=replace(samples.rule, min_rounds=HALF_ROUNDS), buckets=buckets)


def served(decides: Samples, scores: Samples) -> Iterator[tuple[bool, float, float]]:
    """Of every batch: whether another than the default serves it, and the log of its time, and of the twin's, over the
    default's. The default's time is the mean of its two. Not of what `scores` has no times of."""
    regimes = decide(decides)
    for bucket in (its for its in scores.buckets if its.bucket in regimes):
        step = log_of_times(bucket.step_us(scores.num_layers))
        twin = bucket.candidates.index(TWIN)
        first, second = step[0], step[twin]
        both = (np.where(np.isnan(first), second, first) + np.where(np.isnan(second), first, second)) / 2
        boxes = [r.box for r in regimes[bucket.bucket]]
        for c, round_ in np.argwhere(np.isfinite(both)).tolist():
            mean_kv, longest = int(bucket.means[c, round_]), int(bucket.longest[c, round_])
            name = next((box.candidate for box in boxes if box.holds(mean_kv, longest)), scores.default)
            if name == scores.default:
                yield False, 0.0, 0.0
            elif name in bucket.candidates:
                log = step[bucket.candidates.index(name), c, round_] - both[c, round_]
                if np.isfinite(log):
                    yield True, float(log), float(step[twin, c, round_] - step[0, c, round_])
