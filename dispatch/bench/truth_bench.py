"""Timing a stack of a model's layers with each backend, beside the harness's own timing of the same steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from time import monotonic

import numpy as np
import torch

from dispatch.backends import DecodeImpl, Registry
from dispatch.bench.chain_layers import chain_layers
from dispatch.bench.harness import WARM_UP_S, Bench
from dispatch.bench.model_stack import ModelStack
from dispatch.bench.pool import Chain
from dispatch.bench.profiles import SEED, PlannedCell
from dispatch.bench.rounds import ROUNDS
from dispatch.bench.timer import Recording, Timer
from dispatch.bench.truth import PARTS, TruthCell
from dispatch.candidate import Candidate
from dispatch.errors import MeasureError, one_line
from dispatch.gate_inputs import row_sets
from dispatch.samples import TWIN
from dispatch.step import StepInputs

Prepare = Callable[[Callable[[], object]], Callable[[], float]]
"""Takes work; returns what runs it once, over a cold cache, at each call, and says the microseconds."""


@dataclass(frozen=True, eq=False)
class _Arm:
    """A backend in the stack, `time_stack`, and as the harness times it, `recording`: one build serves both.

    `work` is what `time_stack` runs: it keeps alive what a captured graph points at. `index`: its row in the times.
    """

    index: int
    name: str
    impl: DecodeImpl
    recording: Recording
    work: Callable[[], object]
    time_stack: Callable[[], float]

    def run(self, inputs: StepInputs) -> float:
        """Microseconds of one step of the stack, without plan()."""
        if self.impl.needs_plan:
            self.impl.plan(inputs)
        return self.time_stack()

    def time(self, inputs: StepInputs, layers: int) -> tuple[float, ...]:
        """A sample, as PARTS; the harness's, over a chain of so many layers."""
        stack_us = self.run(inputs)
        step = self.recording.start(layers)()
        return stack_us, step.plan_us, step.begin_us, step.layer_us


class TruthBench(Bench):
    """The harness's pages, scratch and way to build and record, and a stack of layers over the same pages."""

    def __init__(
        self,
        stack: ModelStack,
        planned: Mapping[int, tuple[PlannedCell, ...]],
        workspace_bytes: Mapping[str, int],
        max_kv: int,
        registry: Registry,
        timer: Timer,
        prepare: Prepare,
        free_bytes: int,
    ) -> None:
        """As Bench. Raises MeasureError if `free_bytes` does not hold a KV cache for each layer of the stack."""
        super().__init__(stack.spec, planned, workspace_bytes, max_kv, registry, timer, stack.device, free_bytes)
        wanted, there = len(stack.layers), len(self.pool.kv_caches)
        if wanted > there:
            raise MeasureError(f"a stack of {wanted} layers: the harness has KV caches for {there}")
        self.stack, self.prepare = stack, prepare
        self.failed: list[str] = []

    def compare(self, batch: int, backends: tuple[str, ...]) -> tuple[TruthCell, ...]:
        """Time `backends`, the default first, in the cells of a batch size.

        A backend that fails is left out from then on, with a line in `failed`. Raises MeasureError if the default does.
        """
        names = (backends[0], TWIN, *backends[1:])
        inputs, chain, hidden = self.pool.inputs(batch, self.max_kv), self.pool.chain(batch), self.stack.hidden(batch)
        arms: list[_Arm] = []
        for i, name in enumerate(names):
            self.pool.load(inputs, row_sets(self.spec, batch, self.max_kv)[0])  # captured as the harness captures
            try:
                candidate = Candidate(names[0] if name == TWIN else name)
                arms.append(self._arm(i, name, candidate, inputs, chain, hidden))
            except Exception as error:  # whatever a backend raises, it loses itself alone
                self._fail(f"batch {batch}", i, name, error)
        end = monotonic() + WARM_UP_S
        while monotonic() < end:
            arms[0].run(inputs)
        rng = np.random.default_rng([SEED, batch])
        return tuple(self._cell(planned, names, arms, inputs, rng) for planned in self.planned[batch])

    def _arm(
        self, index: int, name: str, candidate: Candidate, inputs: StepInputs, chain: Chain, hidden: torch.Tensor
    ) -> _Arm:
        impl = self.proving.build(len(hidden), candidate)
        recording = self.timer.record(impl, inputs, chain)
        if impl.needs_plan:
            impl.plan(inputs)
        work = partial(self._step, impl, inputs, hidden)
        return _Arm(index, name, impl, recording, work, self.prepare(work))

    def _step(self, impl: DecodeImpl, inputs: StepInputs, hidden: torch.Tensor) -> torch.Tensor:
        impl.begin_step(inputs)
        caches = self.pool.kv_caches[: len(self.stack.layers)]
        return self.stack.step(lambda _, *layer: impl.forward(*layer), inputs, caches, hidden)

    def _cell(
        self,
        planned: PlannedCell,
        names: tuple[str, ...],
        arms: list[_Arm],
        inputs: StepInputs,
        rng: np.random.Generator,
    ) -> TruthCell:
        """Every arm once a round, in shuffled order, on the same lengths. One that fails is taken from `arms`."""
        cell, batch, layers = planned.cell, len(inputs.lengths_host), chain_layers(self.pool, self.timer, planned)
        times = np.full((len(PARTS), len(names), ROUNDS), np.nan)
        for round_ in range(ROUNDS):
            self.pool.load(inputs, planned.lengths[round_])
            for arm in [arms[i] for i in rng.permutation(len(arms))]:
                try:
                    times[:, arm.index, round_] = arm.time(inputs, layers)
                except Exception as error:
                    arms.remove(arm)
                    self._fail(f"batch {batch}, mean KV {cell.mean_kv}", arm.index, arm.name, error)
        return TruthCell(batch, cell.mean_kv, cell.max_kv, len(self.stack.layers), names, times)

    def _fail(self, where: str, index: int, name: str, error: Exception) -> None:
        line = f"{where}: {name}: {one_line(error)}"
        if index < 2:  # the default, or its second run
            raise MeasureError(f"the default cannot be timed: {line}") from error
        self.failed.append(line)
