"""Raw measurements as plain data: what the selector reads, and what a samples file holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dispatch.decision import Reason, Rule

TWIN = "default/twin"  # the default measured a second time: the noise that a decision must clear (A/A)
LONGEST_US = 1e12  # 11 days: no kernel takes so long, and sums over layers stay finite
EVEN = 1000  # the skew of requests that are all alike
PARTS = ("plan_us", "begin_us", "layer_us")


@dataclass(frozen=True, slots=True)
class Cell:
    """What is measured at once. `mean_kv`: the KV point, around which its rounds lie; `max_kv`: the longest request at
    that mean and the median skew of the rounds."""

    mean_kv: int
    max_kv: int
    profile: str


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Why a candidate has no samples in a bucket, or (`cell` given, an index) in one cell of it."""

    candidate: str
    reason: Reason
    detail: str
    cell: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class BucketSamples:
    """Microseconds for one bucket. `times[part, candidate, cell, round]`, float64, NaN where not measured.

    The parts are the host's plan(), begin_step, and one layer's forward. `candidates[0]` is the default,
    `candidates[1]` its twin. `longest[cell, round]` and `means[cell, round]`, int64: tokens of the longest request and
    of a request on average, rounded up, as a plan is asked; 0 for a round that is not the cell's.
    """

    bucket: int
    cells: tuple[Cell, ...]
    candidates: tuple[str, ...]
    times: NDArray[np.float64]
    longest: NDArray[np.int64]
    means: NDArray[np.int64]
    exclusions: tuple[Exclusion, ...] = ()

    def without(self, refused: Mapping[str, str]) -> BucketSamples:
        """The same, with these candidates out, for the reason given; a backend's name stands for its tactics."""
        why = {name: refused.get(name) or refused.get(name.partition("[")[0]) for name in self.candidates}
        out = tuple(Exclusion(name, Reason.FAILED, reason) for name, reason in why.items() if reason)
        return replace(self, exclusions=(*self.exclusions, *(e for e in out if e not in self.exclusions)))

    def step_us(self, num_layers: int) -> NDArray[np.float64]:
        """Cost of a decode step, [candidate, cell, round]."""
        return step_of(self.times, num_layers)


def step_of(times: NDArray[np.float64], num_layers: int) -> NDArray[np.float64]:
    """Cost of a decode step, [...], from times of its parts, [part, ...]: plan + begin_step + layers x forward."""
    plan, begin, layer = times
    step: NDArray[np.float64] = plan + begin + num_layers * layer
    return step


def log_of_times(step_us: NDArray[np.float64]) -> NDArray[np.float64]:
    """Natural logarithm; NaN for a time that is not above 0, which is no measurement."""
    log: NDArray[np.float64] = np.log(step_us, out=np.full_like(step_us, np.nan), where=step_us > 0)
    return log


def skews_of(samples: BucketSamples) -> NDArray[np.int64]:
    """`skew_of` of every round, int64 [cell, round]; 0 for a round that is not the cell's."""
    return skews_in(samples.longest, samples.means)


def skews_in(longest: NDArray[np.int64], means: NDArray[np.int64]) -> NDArray[np.int64]:
    """The same, from the longest request and the mean of every round."""
    skews: NDArray[np.int64] = longest * EVEN // np.maximum(means, 1)
    return skews


def skew_of(mean_kv: int, max_kv: int) -> int:
    """The longest request over the mean, in thousandths, rounded down; 1000 where all are alike.

    The second coordinate of a plan: length profiles are shapes that are scaled to a mean, so between two means that
    were measured, what was measured at the same skew is what is alike.
    """
    return max_kv * EVEN // mean_kv


@dataclass(frozen=True, slots=True)
class Box:
    """A regime of a bucket, and the candidate that serves it. Inclusive bounds of the mean KV length in tokens, and of
    the skew (`skew_of`)."""

    bucket: int
    mean_kv_min: int
    mean_kv_max: int
    skew_min: int
    skew_max: int
    candidate: str

    def holds(self, mean_kv: int, max_kv: int) -> bool:
        """Whether a batch of this mean, and with this longest request, is served by the box."""
        skew = skew_of(mean_kv, max_kv)
        return self.mean_kv_min <= mean_kv <= self.mean_kv_max and self.skew_min <= skew <= self.skew_max


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """One tuning run: everything that the decisions depend on.

    `incumbent`: the boxes of the plan that was stored before, where the run challenges one. `key`: what the
    samples are valid for. `unmeasured`: buckets left out, with the reason.
    """

    key: Mapping[str, Any]
    num_layers: int
    default: str
    priority: tuple[str, ...]
    rule: Rule
    buckets: tuple[BucketSamples, ...]
    unmeasured: Mapping[int, str] = field(default_factory=dict)
    incumbent: tuple[Box, ...] = ()
