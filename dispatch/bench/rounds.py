"""Rounds: every arm of a cell timed once a round, in shuffled order, as long as it may still win there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dispatch.bench.arm import Arm, Begun
from dispatch.bench.chain_layers import chain_layers
from dispatch.bench.drops import DROPS, drop
from dispatch.bench.phases import Phases
from dispatch.bench.pool import PagedPool
from dispatch.bench.profiles import SEED, PlannedCell
from dispatch.bench.sanity import check_bandwidth
from dispatch.bench.timer import StepTime, Timer
from dispatch.decision import Reason
from dispatch.errors import MeasureError, one_line
from dispatch.evidence import Floats
from dispatch.futility import Futility
from dispatch.samples import LONGEST_US, PARTS, TWIN, Exclusion, log_of_times, step_of
from dispatch.step import StepInputs

_log = logging.getLogger(__name__)
T = TypeVar("T")

ROUNDS = 15
# A sample so much above what its arm took in another round of the cell, for as many tokens and as long a request, is
# taken once more when the round is over, and the faster one counts: longer requests are as long again, and a host that
# was interrupted between the start of the clock and of the graph is not.
RETAKE = 1.25


class Rounds:
    """A bucket's samples as they grow: `times` [part, arm, cell, round] in microseconds, and `exclusions`.

    `complete`: the rounds that were gone through to their end.
    """

    def __init__(
        self,
        pool: PagedPool,
        timer: Timer,
        inputs: StepInputs,
        arms: Sequence[Arm],
        num_arms: int,
        cells: Sequence[PlannedCell],
        plan_hidden: bool,
        phases: Phases,
        drops: Mapping[int, float] = DROPS,
        futility: Futility | None = None,
    ) -> None:
        """`arms`: those that may be timed, of `num_arms` rows in the samples. `cells`: each with as many rounds.

        `drops`: after so many rounds, by which log ratio to the default a cell is lost. `futility`: which samples are
        left out after these rounds; None: none of them.
        """
        self.pool, self.timer, self.inputs, self.arms, self.cells = pool, timer, inputs, arms, cells
        self.plan_hidden, self.phases, self.drops, self.futility = plan_hidden, phases, drops, futility
        # of each cell, once: the longest request of the round in which it is shortest
        self.least = [int(cell.lengths.max(axis=1).min()) for cell in cells]
        self.layers = [chain_layers(pool, timer, cell) for cell in cells]
        rounds = len(cells[0].lengths)
        self.times: NDArray[np.float64] = np.full((len(PARTS), num_arms, len(cells), rounds), np.nan)
        self.exclusions: list[Exclusion] = []
        self.skipped = np.zeros(self.times.shape[1:], dtype=bool)
        self.complete = 0

    def run(self, deadline: float, progress: Callable[[int], None]) -> None:
        """Time until all rounds are done, or until `deadline` on the monotonic clock.

        `progress` is told how many samples are done; what it raises ends the rounds.
        """
        rng = np.random.default_rng([SEED, len(self.inputs.lengths_host)])
        for round_ in range(self.times.shape[-1]):
            self.pool.shuffle()
            if not self._round(round_, rng, deadline, progress):
                return
            if round_ + 1 in self.drops:
                r = self._r()[..., : round_ + 1]
                self.exclusions += drop([arm for arm in self.arms if arm.name != TWIN], r, self.drops[round_ + 1])
            if self.futility and round_ + 1 >= max(self.drops, default=0):  # a drop looks at every round until then
                self.skipped = self.futility.skipped(self._r(), self._gone())
            self.complete = round_ + 1

    def _round(self, round_: int, rng: np.random.Generator, deadline: float, progress: Callable[[int], None]) -> bool:
        """One round; whether it came to its end.

        The samples of a cell begin before those of the cell before it are read, so that the device need not wait for
        the host.
        """
        before: list[Begun] = []
        outliers: list[tuple[Begun, StepTime]] = []
        num_arms, num_cells = self.times.shape[1:3]
        try:
            for c, cell in enumerate(self.cells):
                shuffled = [self.arms[i] for i in rng.permutation(len(self.arms))]
                longest = int(cell.lengths[round_].max())
                fit = [arm for arm in shuffled if c not in arm.lost_cells and longest <= arm.longest]
                if monotonic() > deadline:
                    return False
                begun = self._begin([arm for arm in fit if not self.skipped[arm.index, c, round_]], c, round_)
                outliers += self._read(before)
                before = begun
                progress((round_ * num_cells + c) * num_arms)
        finally:  # whatever ends it, nothing is left on the device
            outliers += self._read(before)
        for first, took in outliers:
            if monotonic() > deadline:
                break
            self._retake(first, took)
        progress((round_ + 1) * num_cells * num_arms)
        return True

    def _gone(self) -> NDArray[np.bool_]:
        """Where a row of the samples is not timed any more, [arm, cell]."""
        gone = np.ones(self.times.shape[1:3], dtype=bool)
        for arm in self.arms:
            gone[arm.index] = [c in arm.lost_cells or least > arm.longest for c, least in enumerate(self.least)]
        return gone

    def _r(self) -> Floats:
        """Log ratios to the default of the same round, [arm, cell, round]."""
        log_step = log_of_times(step_of(self.times, self.pool.spec.num_layers))
        ratio: Floats = log_step - log_step[0]
        return ratio

    def _begin(self, arms: Sequence[Arm], c: int, round_: int) -> list[Begun]:
        """A sample of each arm that does not fail, all on the same lengths and pages."""
        if arms:
            with self.phases("lengths and pages"):
                self.pool.load(self.inputs, self.cells[c].lengths[round_])
        begun = [(arm, self._tried(arm, c, partial(arm.recording.start, self.layers[c]))) for arm in arms]
        return [Begun(arm, c, round_, read) for arm, read in begun if read]

    def _read(self, begun: Sequence[Begun]) -> list[tuple[Begun, StepTime]]:
        """Keep their times. Returns those that are to be taken once more, with what they took."""
        outliers = []
        for its in begun:
            time = self._tried(its.arm, its.cell, its.read)
            if time is not None:
                self._keep(its, time)
                if self._step_us(time) > RETAKE * self._expected_us(its):
                    outliers.append((its, time))
        return outliers

    def _retake(self, first: Begun, took: StepTime) -> None:
        """Take a sample once more, on other pages, and keep the faster one."""
        for its in self._begin([first.arm], first.cell, first.round):
            time = self._tried(its.arm, its.cell, its.read)
            if time is not None and self._step_us(time) < self._step_us(took):
                self._keep(its, time)

    def _tried(self, arm: Arm, c: int, work: Callable[[], T]) -> T | None:
        """What `work` returns, or None where it fails: whatever a backend raises, it loses this cell."""
        try:
            with self.phases(f"samples: {arm.name}"):
                return work()
        except Exception as error:
            arm.lost_cells.add(c)
            self.exclusions.append(Exclusion(arm.name, Reason.FAILED, one_line(error), c))
            return None

    def _keep(self, its: Begun, time: StepTime) -> None:
        cell, kept = self.cells[its.cell], self.times[:, its.arm.index, its.cell, its.round]
        kept[:] = np.nan
        try:
            lengths = cell.lengths[its.round]
            check_bandwidth(self.pool.spec, lengths, time.layer_us, self.timer.peak_bytes_per_s)
            kept[:] = _plausible(self._parts(time))
        except MeasureError as error:  # an outlier: of 15 rounds, three may be lost
            _log.info("%s, mean KV %d, %s: %s", its.arm.name, cell.cell.mean_kv, cell.cell.profile, error)

    def _expected_us(self, its: Begun) -> float:
        """The least of what the rounds before this one say, if time grows with the tokens or the longest request."""
        before = self.times[:, its.arm.index, its.cell, : its.round]
        lengths = self.cells[its.cell].lengths[: its.round + 1]
        grown = [own[-1] / own[:-1] for own in (lengths.sum(axis=1), lengths.max(axis=1))]
        step = step_of(before, self.pool.spec.num_layers) * np.maximum(1, np.maximum(*grown))
        return float(np.fmin.reduce(step, initial=np.inf))

    def _parts(self, time: StepTime) -> tuple[float, float, float]:
        """In the order of PARTS. A plan that the engine hides costs nothing."""
        return 0.0 if self.plan_hidden else time.plan_us, time.begin_us, time.layer_us

    def _step_us(self, time: StepTime) -> float:
        return float(step_of(np.array(self._parts(time)), self.pool.spec.num_layers))


def _plausible(parts: tuple[float, float, float]) -> tuple[float, ...]:
    """To a nanosecond. What a timer subtracts may leave a part of nothing just below 0: that is 0."""
    if not all(part < LONGEST_US for part in parts):
        raise MeasureError(f"times that cannot be: {parts}")
    return tuple(max(0.0, round(part, 3)) for part in parts)
