"""Rounds: every arm of a cell timed once a round, in shuffled order, as long as it may still win there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from dispatch.bench.phases import Phases
from dispatch.bench.pool import PagedPool
from dispatch.bench.profiles import SEED, PlannedCell
from dispatch.bench.sanity import check_bandwidth, visible_bytes
from dispatch.bench.timer import Recording, StepTime, Timer
from dispatch.decision import Reason
from dispatch.errors import MeasureError, one_line
from dispatch.samples import LONGEST_US, PARTS, TWIN, Exclusion, log_of_times
from dispatch.step import StepInputs

_log = logging.getLogger(__name__)

ROUNDS = 15
# After so many rounds, an arm that lost a cell to the default in each of them by more than this is not timed there any
# more: no box with that cell could be its own.
DROPS = {2: float(np.log(1.5)), 5: float(np.log(1.10))}
# A sample so much above the least of its arm in its cell is taken once more, and the faster one counts: longer requests
# are as long again, and a host that was interrupted between the start of the clock and of the graph is not.
RETAKE = 1.25
# Above so many bytes of KV a layer (some 30 us on an H200) a few layers back to back are enough to time one, and there
# is no need to wait for more.
LONG_LAYER_BYTES = 100 << 20


@dataclass
class Arm:
    """A candidate (or the default's twin), built and recorded. `index`: its row in the samples."""

    index: int
    name: str
    recording: Recording
    longest: int
    lost_cells: set[int] = field(default_factory=set)
    least_us: dict[int, float] = field(default_factory=dict)

    def runs(self, c: int, longest: int) -> bool:
        """Whether it is timed in cell `c`, whose requests have up to `longest` tokens."""
        return c not in self.lost_cells and longest <= self.longest


class Rounds:
    """A bucket's samples as they grow: `times` [part, arm, cell, round] in microseconds, and `exclusions`."""

    def __init__(
        self,
        pool: PagedPool,
        timer: Timer,
        arms: Sequence[Arm],
        num_arms: int,
        cells: Sequence[PlannedCell],
        drops: Mapping[int, float] = DROPS,
    ) -> None:
        """`arms`: those that may be timed, of `num_arms` rows in the samples. `cells`: each with as many rounds.

        `drops`: after so many rounds, by which log ratio to the default a cell is lost.
        """
        self.pool, self.timer, self.arms, self.cells, self.drops = pool, timer, arms, cells, drops
        # of each cell, once: a sample takes less than a millisecond
        self.longest = [int(cell.lengths.max()) for cell in cells]
        self.layers = [chain_layers(pool, timer, cell) for cell in cells]
        rounds = len(cells[0].lengths)
        self.times: NDArray[np.float64] = np.full((len(PARTS), num_arms, len(cells), rounds), np.nan)
        self.exclusions: list[Exclusion] = []

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
                with phases("lengths and pages"):
                    self.pool.load(inputs, cell.lengths[round_])
                for arm in (self.arms[i] for i in rng.permutation(len(self.arms))):
                    if monotonic() > deadline:
                        return
                    if arm.runs(c, self.longest[c]):
                        with phases(f"samples: {arm.name}"):
                            self._sample(arm, c, round_, plan_hidden)
                progress((round_ * len(self.cells) + c + 1) * self.times.shape[1])
            if round_ + 1 in self.drops:
                self._drop(round_ + 1, self.drops[round_ + 1])

    def _sample(self, arm: Arm, c: int, round_: int, plan_hidden: bool) -> None:
        cell, spec = self.cells[c], self.pool.spec
        try:
            time = self._timed(arm, c)
        except Exception as error:  # whatever a backend raises, it loses this cell
            arm.lost_cells.add(c)
            self.exclusions.append(Exclusion(arm.name, Reason.FAILED, one_line(error), c))
            return
        try:
            check_bandwidth(spec, cell.lengths[round_], time.layer_us, self.timer.peak_bytes_per_s)
            self.times[:, arm.index, c, round_] = _plausible(time, plan_hidden)
            arm.least_us[c] = min(self._step_us(time), arm.least_us.get(c, np.inf))
        except MeasureError as error:  # an outlier: of 15 rounds, three may be lost
            _log.info("%s, mean KV %d, %s: %s", arm.name, cell.cell.mean_kv, cell.cell.profile, error)

    def _timed(self, arm: Arm, c: int) -> StepTime:
        """One sample, or the faster one of two."""
        time = arm.recording.time(self.layers[c])
        if self._step_us(time) > RETAKE * arm.least_us.get(c, np.inf):
            time = min(time, arm.recording.time(self.layers[c]), key=self._step_us)
        return time

    def _step_us(self, time: StepTime) -> float:
        return time.plan_us + time.begin_us + self.pool.spec.num_layers * time.layer_us

    def _drop(self, rounds: int, log_ratio: float) -> None:
        """Take from each arm the cells that it lost to the default by over `log_ratio` in every round so far."""
        plan, begin, layer = self.times[..., :rounds]
        log_step = log_of_times(plan + begin + self.pool.spec.num_layers * layer)
        for arm in (arm for arm in self.arms if arm.name != TWIN):
            ratio = log_step[arm.index] - log_step[0]
            for c in np.flatnonzero((ratio > log_ratio).all(axis=1)).tolist():
                if c not in arm.lost_cells:
                    arm.lost_cells.add(c)
                    detail = f"{np.exp(np.median(ratio[c])):.2f} times the default's time"
                    self.exclusions.append(Exclusion(arm.name, Reason.DROPPED, detail, c))


def chain_layers(pool: PagedPool, timer: Timer, cell: PlannedCell) -> int:
    """How many layers of the pool to time back to back in this cell."""
    layer_bytes = [visible_bytes(pool.spec, lengths) for lengths in cell.lengths]
    few_or_many = min if np.mean(layer_bytes) > LONG_LAYER_BYTES else max
    return min(few_or_many(timer.chain_layers), len(pool.kv_caches))


def _plausible(time: StepTime, plan_hidden: bool) -> tuple[float, ...]:
    """The parts to a nanosecond. What a timer subtracts may leave a part of nothing just below 0: that is 0."""
    parts = (0.0 if plan_hidden else time.plan_us, time.begin_us, time.layer_us)
    if not all(part < LONGEST_US for part in parts):
        raise MeasureError(f"times that cannot be: {parts}")
    return tuple(max(0.0, round(part, 3)) for part in parts)
