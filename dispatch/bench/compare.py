"""A plan beside its rivals in one snapshot of traffic: speeds from times alone. Pure; needs numpy alone.

A speed is how many times faster one arm is than another: the median over rounds of the ratio of their times in the same
round. The default's time is the mean of its two runs. What serves with the same candidate has speed 1, exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dispatch.candidate import Candidate
from dispatch.evidence import median_of_rounds
from dispatch.samples import TWIN, log_of_times

PLAN = "plan"
EQUAL_PLAN = "equal-length plan"
BEST = "best candidate of each snapshot"  # on even rounds, scored on odd ones: not its luck
BEST_FIXED = "best backend of each snapshot"  # likewise, among backends without a tactic
TAIL = 0.025  # probability of a median beyond each end of an interval, where there are 6 rounds or more

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Speed:
    """A median over rounds, and the interval that holds the true one with 95%; of fewer than 6 rounds, all of them."""

    speed: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A batch, and what a step of it took.

    `batch`, `mean_kv`, `max_kv`: what the plan is asked; the mean is rounded up. `kv_bytes`: of a layer. `candidates`:
    the default first, then its twin. `step_us`: float64 [candidate, round], NaN where not measured. `planned`, `equal`:
    the candidates that the plan and the equal-length plan name for it; None: they name none.
    """

    trace: str
    bucket: int
    batch: int
    mean_kv: int
    max_kv: int
    kv_bytes: int
    candidates: tuple[str, ...]
    step_us: Floats
    planned: str | None
    equal: str | None

    @property
    def served(self) -> str:
        """What a step is served with: the plan's candidate, or the default where there is none that could be timed."""
        return self.planned if self.planned and self._timed(self.planned) else self.candidates[0]

    @property
    def fixed(self) -> tuple[str, ...]:
        """The backends as an engine that never switches runs them; the default first."""
        return tuple(name for name in self.candidates if name != TWIN and not Candidate.parse(name).tactic)

    @property
    def measured(self) -> bool:
        """Whether there is a time of the default to compare with."""
        return self._timed(self.candidates[0])

    def candidate_of(self, arm: str) -> str | None:
        """What an arm serves the snapshot with: one of those above, or a candidate. None: there is no time of it."""
        if arm == PLAN:
            return self.served
        if arm == BEST:
            return self._best([name for name in self.candidates if name != TWIN])
        if arm == BEST_FIXED:
            return self._best(self.fixed)
        name = self.equal if arm == EQUAL_PLAN else arm
        return name if name in self.candidates and self._timed(name) else None

    def speed(self, arm: str, over: str) -> Speed | None:
        """How many times faster `arm` is than `over`. None where one of them has no times beside the other's."""
        ours, theirs = self.candidate_of(arm), self.candidate_of(over)
        if ours is None or theirs is None:
            return None
        ratio = self._log_us[self._row(theirs)] - self._log_us[self._row(ours)]
        return _speed(ratio[1::2] if {arm, over} & {BEST, BEST_FIXED} else ratio)

    @property
    def noise(self) -> Speed | None:
        """The default's second run over its first."""
        first, second = log_of_times(self.step_us[:2])
        return _speed(first - second)

    def median_us(self, arm: str) -> float | None:
        """Microseconds of a step."""
        name = self.candidate_of(arm)
        return None if name is None else float(np.exp(median_of_rounds(self._log_us[self._row(name)])))

    def to_json(self, arms: Sequence[str]) -> dict[str, Any]:
        """Plain data: what each arm is, its median, the plan's speed over it; and every time."""
        return {
            "trace": self.trace,
            "batch": self.batch,
            "bucket": self.bucket,
            "mean_kv": self.mean_kv,
            "max_kv": self.max_kv,
            "kv_bytes_per_layer": self.kv_bytes,
            "planned": self.planned,
            "noise": _speed_json(self.noise),
            "arms": {
                arm: {
                    "candidate": self.candidate_of(arm),
                    "us": _rounded(self.median_us(arm)),
                    "plan_is_faster": _speed_json(self.speed(PLAN, arm)),
                }
                for arm in arms
            },
            "step_us": {
                name: [_rounded(us) for us in self.step_us[i].tolist()] for i, name in enumerate(self.candidates)
            },
        }

    @cached_property
    def _log_us(self) -> Floats:
        """Of each candidate and round, with the mean of the default's two runs in its row."""
        first, second = self.step_us[:2]
        both = (np.where(np.isnan(first), second, first) + np.where(np.isnan(second), first, second)) / 2
        return log_of_times(np.vstack([both, self.step_us[1:]]))

    def _row(self, name: str) -> int:
        return self.candidates.index(name)

    def _timed(self, name: str) -> bool:
        return name in self.candidates and bool(np.isfinite(self._log_us[self._row(name)]).any())

    def _best(self, names: Sequence[str]) -> str | None:
        medians = {name: float(median_of_rounds(self._log_us[self._row(name), ::2])) for name in names}
        timed = [name for name in names if not math.isnan(medians[name])]
        return min(timed, key=medians.__getitem__, default=None)


def median_interval(values: Floats) -> tuple[float, float]:
    """Order statistics that hold the median of what `values` were drawn from, each missed with at most TAIL.

    The k-th smallest of n values is above the median with the probability of fewer than k heads in n tosses.
    """
    n, cut, below = len(values), 0, 0.5 ** len(values)
    while (below := below + math.comb(n, cut + 1) * 0.5**n) <= TAIL:
        cut += 1
    ordered = np.sort(values)
    return float(ordered[cut]), float(ordered[n - 1 - cut])


def _speed(log_ratios: Floats) -> Speed | None:
    valid = log_ratios[np.isfinite(log_ratios)]
    if not valid.size:
        return None
    low, high = median_interval(valid)
    return Speed(*(float(np.exp(log)) for log in (np.median(valid), low, high)))


def _speed_json(speed: Speed | None) -> list[float] | None:
    """[median, low, high]"""
    return None if speed is None else [round(value, 4) for value in (speed.speed, speed.low, speed.high)]


def _rounded(us: float | None) -> float | None:
    return None if us is None or math.isnan(us) else round(us, 3)
