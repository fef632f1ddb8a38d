"""Rounds: every arm of a cell timed once a round, in shuffled order, as long as it may still win there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dispatch.bench.phases import Phases
from dispatch.bench.pool import PagedPool
from dispatch.bench.profiles import SEED, PlannedCell
from dispatch.bench.sanity import check_bandwidth, visible_bytes
from dispatch.bench.timer import Recording, StepTime, Timer
from dispatch.decision import Reason
from dispatch.errors import MeasureError, one_line
from dispatch.evidence import Floats
from dispatch.futility import Futility
from dispatch.samples import LONGEST_US, PARTS, TWIN, Exclusion, log_of_times
from dispatch.spec import AttentionSpec
from dispatch.step import StepInputs

_log = logging.getLogger(__name__)
T = TypeVar("T")

ROUNDS = 15
# After so many rounds, an arm that lost a cell to the default in each of them by more than this is not timed there any
# more: no box with that cell could be its own.
DROPS = {2: float(np.log(1.5)), 5: float(np.log(1.10))}
# A sample so much above what its arm took in another round of the cell, for as many tokens and as long a request, is
# taken once more, and the faster one counts: longer requests are as long again, and a host that was interrupted between
# the start of the clock and of the graph is not.
RETAKE = 1.25
# Above so many bytes of KV a layer (some 30 us and 100 us on an H200) fewer layers back to back are enough to time one,
# and there is no need to wait for more.
LONG_LAYER_BYTES = (100 << 20, 400 << 20)


@dataclass
class Arm:
    """A candidate (or the default's twin), built and recorded. `index`: its row in the samples."""

    index: int
    name: str
    recording: Recording
    longest: int
    lost_cells: set[int] = field(default_factory=set)


class Rounds:
    """A bucket's samples as they grow: `times` [part, arm, cell, round] in microseconds, and `exclusions`.

    `complete`: the rounds that were gone through to their end.
    """

    def __init__(
        self,
        pool: PagedPool,
        timer: Timer,
        arms: Sequence[Arm],
        num_arms: int,
        cells: Sequence[PlannedCell],
        drops: Mapping[int, float] = DROPS,
        futility: Futility | None = None,
    ) -> None:
        """`arms`: those that may be timed, of `num_arms` rows in the samples. `cells`: each with as many rounds.

        `drops`: after so many rounds, by which log ratio to the default a cell is lost. `futility`: which samples are
        left out after these rounds; None: none of them.
        """
        self.pool, self.timer, self.arms, self.cells, self.drops = pool, timer, arms, cells, drops
        self.futility = futility
        # of each cell, once: the longest request of the round in which it is shortest
        self.least = [int(cell.lengths.max(axis=1).min()) for cell in cells]
        self.layers = [chain_layers(pool, timer, cell) for cell in cells]
        rounds = len(cells[0].lengths)
        self.times: NDArray[np.float64] = np.full((len(PARTS), num_arms, len(cells), rounds), np.nan)
        self.exclusions: list[Exclusion] = []
        self.skipped = np.zeros(self.times.shape[1:], dtype=bool)
        self.complete = 0

    def run(
        self,
        inputs: StepInputs,
        plan_hidden: bool,
        deadline: float,
        progress: Callable[[int], None],
        phases: Phases,
    ) -> None:
        """Time until all rounds are done, or until `deadline` on the monotonic clock."""
        rng = np.random.default_rng([SEED, len(inputs.lengths_host)])
        for round_ in range(self.times.shape[-1]):
            self.pool.shuffle()
            for c, cell in enumerate(self.cells):
                shuffled = [self.arms[i] for i in rng.permutation(len(self.arms))]
                longest = int(cell.lengths[round_].max())
                fit = [arm for arm in shuffled if c not in arm.lost_cells and longest <= arm.longest]
                arms = [arm for arm in fit if not self.skipped[arm.index, c, round_]]
                if monotonic() > deadline:
                    return
                if arms:
                    with phases("lengths and pages"):
                        self.pool.load(inputs, cell.lengths[round_])
                    for arm, time in self._sample(arms, c, round_, phases):
                        self._keep(arm, c, round_, time, plan_hidden)
                progress((round_ * len(self.cells) + c + 1) * self.times.shape[1])
            if round_ + 1 in self.drops:
                self._drop(round_ + 1, self.drops[round_ + 1])
            if self.futility and round_ + 1 >= max(self.drops, default=0):  # a drop looks at every round until then
                self.skipped = self.futility.skipped(self._r(), self._gone())
            self.complete = round_ + 1

    def _gone(self) -> NDArray[np.bool_]:
        """Where a row of the samples is not timed any more, [arm, cell]."""
        gone = np.ones(self.times.shape[1:3], dtype=bool)
        for arm in self.arms:
            gone[arm.index] = [c in arm.lost_cells or least > arm.longest for c, least in enumerate(self.least)]
        return gone

    def _r(self) -> Floats:
        """Log ratios to the default of the same round, [arm, cell, round]."""
        plan, begin, layer = self.times
        log_step = log_of_times(plan + begin + self.pool.spec.num_layers * layer)
        ratio: Floats = log_step - log_step[0]
        return ratio

    def _sample(self, arms: Sequence[Arm], c: int, round_: int, phases: Phases) -> list[tuple[Arm, StepTime]]:
        """One sample of each arm that does not fail, or the faster one of two.

        All begin before the first is read: the device need not wait for the host between them.
        """

        def tried(arm: Arm, work: Callable[[], T]) -> list[tuple[Arm, T]]:
            try:
                with phases(f"samples: {arm.name}"):
                    return [(arm, work())]
            except Exception as error:  # whatever a backend raises, it loses this cell
                arm.lost_cells.add(c)
                self.exclusions.append(Exclusion(arm.name, Reason.FAILED, one_line(error), c))
                return []

        def final(arm: Arm, time: StepTime) -> StepTime:
            if self._step_us(time) > RETAKE * self._expected_us(arm, c, round_):
                return min(time, arm.recording.start(self.layers[c])(), key=self._step_us)
            return time

        begun = [its for arm in arms for its in tried(arm, partial(arm.recording.start, self.layers[c]))]
        ended = [its for arm, read in begun for its in tried(arm, read)]
        return [its for arm, time in ended for its in tried(arm, partial(final, arm, time))]

    def _keep(self, arm: Arm, c: int, round_: int, time: StepTime, plan_hidden: bool) -> None:
        cell, spec = self.cells[c], self.pool.spec
        try:
            check_bandwidth(spec, cell.lengths[round_], time.layer_us, self.timer.peak_bytes_per_s)
            self.times[:, arm.index, c, round_] = _plausible(time, plan_hidden)
        except MeasureError as error:  # an outlier: of 15 rounds, three may be lost
            _log.info("%s, mean KV %d, %s: %s", arm.name, cell.cell.mean_kv, cell.cell.profile, error)

    def _expected_us(self, arm: Arm, c: int, round_: int) -> float:
        """The least of what the rounds before this one say, if time grows with the tokens or the longest request."""
        plan, begin, layer = self.times[:, arm.index, c, :round_]
        lengths = self.cells[c].lengths[: round_ + 1]
        grown = [own[round_] / own[:round_] for own in (lengths.sum(axis=1), lengths.max(axis=1))]
        step = (plan + begin + self.pool.spec.num_layers * layer) * np.maximum(1, np.maximum(*grown))
        return float(np.fmin.reduce(step, initial=np.inf))

    def _step_us(self, time: StepTime) -> float:
        return time.plan_us + time.begin_us + self.pool.spec.num_layers * time.layer_us

    def _drop(self, rounds: int, log_ratio: float) -> None:
        """Take from each arm the cells that it lost to the default by over `log_ratio` in every round so far."""
        r = self._r()[..., :rounds]
        for arm in (arm for arm in self.arms if arm.name != TWIN):
            ratio = r[arm.index]
            lost = (ratio > log_ratio) | np.isnan(ratio)  # some rounds may be too long for it
            for c in np.flatnonzero(lost.all(axis=1) & np.isfinite(ratio).any(axis=1)).tolist():
                if c not in arm.lost_cells:
                    arm.lost_cells.add(c)
                    detail = f"{np.exp(np.nanmedian(ratio[c])):.2f} times the default's time"
                    self.exclusions.append(Exclusion(arm.name, Reason.DROPPED, detail, c))


def chain_layers(pool: PagedPool, timer: Timer, cell: PlannedCell) -> int:
    """How many layers of the pool to time back to back in this cell."""
    return min(layers_for(pool.spec, timer, cell.lengths), len(pool.kv_caches))


def layers_for(spec: AttentionSpec, timer: Timer, lengths: NDArray[np.int64]) -> int:
    """How many of the timer's, for a layer that reads what these rounds do, [round, row]."""
    layer_bytes = np.mean([visible_bytes(spec, row) for row in lengths])
    step = sum(bool(layer_bytes > limit) for limit in LONG_LAYER_BYTES)
    return timer.chain_layers[min(step, len(timer.chain_layers) - 1)]


def _plausible(time: StepTime, plan_hidden: bool) -> tuple[float, ...]:
    """The parts to a nanosecond. What a timer subtracts may leave a part of nothing just below 0: that is 0."""
    parts = (0.0 if plan_hidden else time.plan_us, time.begin_us, time.layer_us)
    if not all(part < LONGEST_US for part in parts):
        raise MeasureError(f"times that cannot be: {parts}")
    return tuple(max(0.0, round(part, 3)) for part in parts)
