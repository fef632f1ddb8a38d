"""The harness: candidates interleaved in shuffled rounds over the cells of a bucket. Measures; decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic

import numpy as np
import torch
from numpy.typing import NDArray

from dispatch.backends import DecodeImpl, Registry
from dispatch.bench.pool import Chain, PagedPool, page_bytes
from dispatch.bench.profiles import SEED, PlannedCell
from dispatch.bench.timer import Recording, StepTime, Timer
from dispatch.candidate import Candidate
from dispatch.decision import Reason
from dispatch.errors import MeasureError, one_line
from dispatch.gate import Gate
from dispatch.gate_inputs import gate_pages
from dispatch.samples import LONGEST_US, PARTS, TWIN, BucketSamples, Exclusion, log_of_times
from dispatch.spec import AttentionSpec
from dispatch.step import StepInputs
from dispatch.workspace import Workspaces

ROUNDS = 15
# After so many rounds, an arm that lost to the default in every cell of each by more than this is not worth more time.
DROPS = {1: float(np.log(2.0)), 5: float(np.log(1.10))}
WARM_UP_S = 0.3  # clocks climb for this long; the first samples without it were 1.5 times too slow

Times = NDArray[np.float64]
Planned = Mapping[int, Sequence[PlannedCell]]


class DefaultFailed(MeasureError):
    """The default cannot be built, or its numbers are wrong: nothing can be decided against it."""

    def __init__(self, message: str, reason: Reason) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass
class _Arm:
    """A candidate (or the default's twin), built and recorded. `index`: its row in the samples."""

    index: int
    name: str
    recording: Recording
    longest: int
    dropped: bool = False
    failed_cells: set[int] = field(default_factory=set)

    def runs(self, c: int, longest: int) -> bool:
        return not self.dropped and c not in self.failed_cells and longest <= self.longest


class Bench:
    """What a tuning run measures with: pages and scratch of its own, and a timer. Nothing of it is the engine's."""

    def __init__(
        self,
        spec: AttentionSpec,
        planned: Planned,
        workspace_bytes: Mapping[str, int],
        max_kv: int,
        registry: Registry,
        timer: Timer,
        device: torch.device,
        free_bytes: int,
    ) -> None:
        """`planned`: the cells of each bucket. `max_kv`: the longest served, for which everything is built.

        `workspace_bytes`: what each family's scratch must hold.

        Raises MeasureError if `free_bytes` does not hold the pages of one layer.
        """
        self.spec, self.planned, self.max_kv = spec, planned, max_kv
        self.registry, self.timer, self.device = registry, timer, device
        pages = max(_most_pages(spec, bucket, cells, max_kv) for bucket, cells in planned.items())
        layer_bytes = (pages + 1) * page_bytes(spec)
        free_bytes -= sum(workspace_bytes.values())
        if layer_bytes > free_bytes:
            raise MeasureError(f"one layer's pages need {layer_bytes >> 20} MiB; {free_bytes >> 20} MiB are free")
        self.pool = PagedPool(spec, pages, min(timer.chain_layers, free_bytes // layer_bytes), device)
        self.workspaces = Workspaces(device)
        for family, size in workspace_bytes.items():
            self.workspaces.reserve(family, size)
        self.warm = False

    def measure(
        self, bucket: int, candidates: Sequence[str], deadline: float, progress: Callable[[int], None]
    ) -> BucketSamples:
        """Gate and time `candidates`, the default first, until `deadline` on the monotonic clock.

        `progress` is told how many samples of the bucket are done. Raises DefaultFailed.
        """
        names = (candidates[0], TWIN, *candidates[1:])
        cells = self.planned[bucket]
        inputs, chain = self.pool.inputs(bucket, self.max_kv), self.pool.chain(bucket)
        exclusions: list[Exclusion] = []
        arms = self._prove(names, inputs, chain, exclusions)
        if not self.warm:
            self._warm_up(arms)
        times = np.full((len(PARTS), len(names), len(cells), ROUNDS), np.nan)
        self._run_rounds(arms, cells, inputs, times, exclusions, deadline, progress)
        return BucketSamples(bucket, tuple(p.cell for p in cells), names, times, tuple(exclusions))

    def _prove(self, names: Sequence[str], inputs: StepInputs, chain: Chain, exclusions: list[Exclusion]) -> list[_Arm]:
        """Build, record and gate every candidate; those that fail are excluded with their reason."""
        arms: list[_Arm] = []
        candidates = [Candidate.parse(names[0] if name == TWIN else name) for name in names]
        limits = [candidate.max_kv or self.max_kv for candidate in candidates]
        for limit in dict.fromkeys(limits):
            gate = Gate(self.pool, inputs, chain, limit)
            ready = []
            for i in (i for i, its in enumerate(limits) if its == limit):
                gate.load_first()
                try:
                    impl = self._build(len(inputs.lengths_host), candidates[i])
                    ready.append(_Arm(i, names[i], self.timer.record(impl, inputs, chain), limit))
                except Exception as error:  # whatever a backend raises, it loses itself alone
                    exclusions.append(Exclusion(names[i], Reason.FAILED, one_line(error)))
            wrong = gate.check({arm.name: arm.recording for arm in ready})
            gate.restore()
            exclusions += [Exclusion(name, Reason.GATE_FAILED, why) for name, why in wrong.items() if why]
            arms += [arm for arm in ready if not wrong[arm.name]]
        for e in exclusions:
            if e.candidate in (names[0], TWIN):
                raise DefaultFailed(f"the default {names[0]}: {e.detail}", e.reason)
        return arms

    def _run_rounds(
        self,
        arms: Sequence[_Arm],
        cells: Sequence[PlannedCell],
        inputs: StepInputs,
        times: Times,
        exclusions: list[Exclusion],
        deadline: float,
        progress: Callable[[int], None],
    ) -> None:
        """Fill `times` [part, candidate, cell, round], every arm of a cell once a round, in shuffled order."""
        rng = np.random.default_rng([SEED, len(inputs.lengths_host)])
        for round_ in range(ROUNDS):
            for c, cell in enumerate(cells):
                self.pool.load(inputs, cell.lengths[round_], rng)
                longest = int(cell.lengths.max())
                for arm in (arms[i] for i in rng.permutation(len(arms))):
                    if monotonic() > deadline:
                        return
                    if not arm.runs(c, longest):
                        continue
                    try:
                        times[:, arm.index, c, round_] = _plausible(arm.recording.time())
                    except Exception as error:
                        arm.failed_cells.add(c)
                        exclusions.append(Exclusion(arm.name, Reason.FAILED, one_line(error), c))
                progress((round_ * len(cells) + c + 1) * times.shape[1])
            if round_ + 1 in DROPS:
                exclusions += self._drop(arms, times[..., : round_ + 1], DROPS[round_ + 1])

    def _build(self, bucket: int, candidate: Candidate) -> DecodeImpl:
        backend = self.registry.get(candidate.backend)
        scratch = self.workspaces.get(backend.family)
        return backend.build(self.spec, bucket, candidate.max_kv or self.max_kv, scratch, candidate.knobs)

    def _warm_up(self, arms: Sequence[_Arm]) -> None:
        end = monotonic() + WARM_UP_S
        while monotonic() < end:
            for arm in arms:
                arm.recording.run()
        self.warm = True

    def _drop(self, arms: Sequence[_Arm], times: Times, log_ratio: float) -> list[Exclusion]:
        """Stop the arms that lost to the default in every cell of every round so far by over `log_ratio`."""
        plan, begin, layer = times
        log_step = log_of_times(plan + begin + self.spec.num_layers * layer)
        dropped = []
        for arm in arms:
            ratio = log_step[arm.index] - log_step[0]
            if not arm.dropped and bool((ratio > log_ratio).all()) and arm.name != TWIN:
                arm.dropped = True
                times_slower = float(np.exp(np.median(ratio)))
                dropped.append(Exclusion(arm.name, Reason.DROPPED, f"{times_slower:.2f} times the default's time"))
        return dropped


def _plausible(time: StepTime) -> tuple[float, ...]:
    """The parts to a nanosecond. What a timer subtracts may leave a part of nothing just below 0: that is 0."""
    parts = (time.plan_us, time.begin_us, time.layer_us)
    if not all(part < LONGEST_US for part in parts):
        raise MeasureError(f"times that cannot be: {parts}")
    return tuple(max(0.0, round(part, 3)) for part in parts)


def _most_pages(spec: AttentionSpec, bucket: int, cells: Sequence[PlannedCell], max_kv: int) -> int:
    measured = max(int((-(-cell.lengths // spec.page_size)).sum(axis=1).max()) for cell in cells)
    return max(measured, gate_pages(spec, bucket, max_kv))
