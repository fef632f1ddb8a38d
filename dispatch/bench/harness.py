"""The harness: candidates interleaved in shuffled rounds over the cells of a bucket. Measures; decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from time import monotonic

import numpy as np
import torch

from dispatch.backends import Registry
from dispatch.bench.arm import Arm
from dispatch.bench.phases import Phases
from dispatch.bench.pool import Chain, PagedPool, page_bytes
from dispatch.bench.profiles import PlannedCell, means_of
from dispatch.bench.proving import GATE_COPIES, Proving
from dispatch.bench.rounds import Rounds
from dispatch.bench.timer import Timer
from dispatch.candidate import Candidate
from dispatch.decision import Reason, Rule
from dispatch.errors import MeasureError
from dispatch.futility import Futility
from dispatch.gate_inputs import gate_pages
from dispatch.samples import PARTS, TWIN, BucketSamples, Exclusion
from dispatch.spec import AttentionSpec
from dispatch.step import StepInputs
from dispatch.traits import EngineTraits
from dispatch.workspace import Workspaces

WARM_UP_S = 0.3  # clocks climb for this long; the first samples without it were 1.5 times too slow

Planned = Mapping[int, Sequence[PlannedCell]]


class DefaultFailed(MeasureError):
    """The default cannot be built, or its numbers are wrong: nothing can be decided against it."""

    def __init__(self, message: str, reason: Reason) -> None:
        super().__init__(message)
        self.reason = reason


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
        phases: Phases | None = None,
        traits: EngineTraits | None = None,
    ) -> None:
        """`planned`: the cells of each bucket. `max_kv`: the longest served, for which everything is built.

        `workspace_bytes`: what each family's scratch must hold.

        Raises MeasureError if `free_bytes` does not hold the pages of one layer.
        """
        self.spec, self.planned, self.max_kv = spec, planned, max_kv
        self.registry, self.timer, self.device, self.phases = registry, timer, device, phases or Phases()
        self.traits = traits or EngineTraits()
        pages = max(_most_pages(spec, bucket, cells, max_kv) for bucket, cells in planned.items())
        layer_bytes = (pages + 1) * page_bytes(spec)
        free_bytes -= sum(workspace_bytes.values())
        free_bytes -= GATE_COPIES * max(gate_pages(spec, bucket, max_kv) for bucket in planned) * page_bytes(spec)
        if layer_bytes > free_bytes:
            raise MeasureError(
                f"one layer's pages need {layer_bytes >> 20} MiB; {max(0, free_bytes) >> 20} MiB are free"
            )
        with self.phases("pages and scratch"):
            self.pool = PagedPool(spec, pages, min(max(timer.chain_layers), free_bytes // layer_bytes), device)
        self.workspaces = Workspaces(device)
        for family, size in workspace_bytes.items():
            self.workspaces.reserve(family, size)
        self.proving = Proving(
            self.pool, self.workspaces, registry, timer, max_kv, self.traits.finite_kv, self._stage, self.phases
        )
        self.warm = False
        self.complete_rounds = 0  # of the bucket that was measured last

    def _stage(self, candidate: Candidate, what: str) -> AbstractContextManager[None]:
        return self.phases(f"build, compile, capture: {candidate.backend}")

    def measure(
        self,
        bucket: int,
        candidates: Sequence[str],
        deadline: float,
        progress: Callable[[int], None],
        stored: Collection[str] = (),
    ) -> BucketSamples:
        """Gate and time `candidates`, the default first, until `deadline` on the monotonic clock.

        `progress` is told how many samples of the bucket are done. `stored`: the candidates of its stored boxes. What
        can change no decision is left out. Raises DefaultFailed.
        """
        names = (candidates[0], TWIN, *candidates[1:])
        cells = self.planned[bucket]
        inputs, chain = self.pool.inputs(bucket, self.max_kv), self.pool.chain(bucket)
        arms, exclusions = self._prove(names, inputs, chain, deadline)
        if not self.warm:
            self._warm_up(arms)
        longest = np.array([planned.lengths.max(axis=1) for planned in cells])
        means = np.array([means_of(planned.lengths) for planned in cells])
        nothing = np.full((len(PARTS), len(names), *longest.shape), np.nan)
        samples = BucketSamples(bucket, tuple(p.cell for p in cells), names, nothing, longest, means)
        futility = Futility(samples, Rule(), stored)
        hidden = self.traits.plan_hidden
        rounds = Rounds(self.pool, self.timer, inputs, arms, len(names), cells, hidden, self.phases, futility=futility)
        rounds.run(deadline, progress)
        self.complete_rounds = rounds.complete
        return replace(samples, times=rounds.times, exclusions=(*exclusions, *rounds.exclusions))

    def _prove(
        self, names: Sequence[str], inputs: StepInputs, chain: Chain, deadline: float
    ) -> tuple[list[Arm], list[Exclusion]]:
        """Every candidate that may be timed, as an arm, and why the others may not. Raises DefaultFailed."""
        candidates = {name: Candidate.parse(names[0] if name == TWIN else name) for name in names}
        proven, exclusions = self.proving.prove(candidates, inputs, chain, self.max_kv, deadline)
        for e in exclusions:
            if e.candidate in (names[0], TWIN):
                raise DefaultFailed(f"the default {names[0]}: {e.detail}", e.reason)
        arms = [
            Arm(i, name, proven[name], candidates[name].max_kv or self.max_kv)
            for i, name in enumerate(names)
            if name in proven
        ]
        return arms, exclusions

    def _warm_up(self, arms: Sequence[Arm]) -> None:
        end = monotonic() + WARM_UP_S
        while monotonic() < end:
            for arm in arms:
                arm.recording.run(len(self.pool.kv_caches))
        self.warm = True


def _most_pages(spec: AttentionSpec, bucket: int, cells: Sequence[PlannedCell], max_kv: int) -> int:
    measured = max(int((-(-cell.lengths // spec.page_size)).sum(axis=1).max()) for cell in cells)
    return max(measured, gate_pages(spec, bucket, max_kv))
