"""What dispatching a step costs on the host: the refresh of the buffers and the choice, and beside it plan()."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter_ns

import torch

from dispatch.backends import Registry
from dispatch.bench.lookup import random_plan
from dispatch.candidate import Candidate
from dispatch.device import DeviceFingerprint
from dispatch.engine.buffers import StepBuffers
from dispatch.engine.builder import Builder, BuiltStep
from dispatch.engine.capture import Ready
from dispatch.engine.choose import Choice
from dispatch.engine.counts import Counts
from dispatch.engine.groups import LayerGroup
from dispatch.engine.prepare import batch_of
from dispatch.engine.serving import Serving
from dispatch.engine.variants import Variant
from dispatch.spec import AttentionSpec
from dispatch.step import StepInputs

REPEATS = 200
LONGEST = 8192
BUCKETS_IN_PLAN, BOXES = 20, 3


@dataclass(frozen=True)
class StepCost:
    """Microseconds on the host, medians: the refresh, the choice and its count, and plan() of each eligible backend."""

    batch: int
    refresh_us: float
    choose_us: float
    plan_us: Mapping[str, float]


def step_cost(spec: AttentionSpec, batch: int, device: DeviceFingerprint, backends: Registry) -> StepCost:
    """For a batch one row short of its bucket, so that a row is padded, and lengths that are new at every step."""
    torch_device = torch.device(device.kind)
    group = LayerGroup(spec, (0,))
    buffers = StepBuffers([group], (batch,), LONGEST, 0, torch_device)
    table = torch.zeros(batch - 1, spec.max_pages(LONGEST), dtype=torch.int32, device=torch_device)
    lengths = [torch.randint(1, LONGEST, (batch - 1,), dtype=torch.int32) for _ in range(REPEATS)]
    serving = _serving(group, batch)

    refresh_us = _median_us(lambda step: buffers.refresh(batch, lengths[step], [table]), torch_device)
    inputs = buffers.inputs(batch)
    plans = {}
    for name in backends.priority(device):
        if backends.support(name, spec, device).ok:
            plan_us = _plan_us(name, group, batch, inputs, backends, torch_device)
            plans[name] = plan_us
    choose_us = _median_us(lambda step: serving.choose(batch, batch_of(lengths[step])[:3]), torch_device)
    return StepCost(batch, refresh_us, choose_us, plans)


def _serving(group: LayerGroup, batch: int) -> Serving:
    """A plan of a usual size, with everything that it names captured for the bucket, the default among it."""
    table = random_plan(random.Random(0), BUCKETS_IN_PLAN, BOXES)
    names = sorted({entry.backend for entry in table.entries})
    ready = Ready(BuiltStep(_no_step, (), (), [group], {}), lambda: None)
    captured: dict[tuple[int, Variant], Ready] = {(batch, (Candidate(name),)): ready for name in names}
    return Serving([Choice(Candidate(names[0]), None, table)], captured, Counts())


def _no_step(*_: object) -> None:
    """In the place of an engine's."""


def _plan_us(
    name: str, group: LayerGroup, batch: int, inputs: tuple[StepInputs, ...], backends: Registry, device: torch.device
) -> float:
    builder = Builder(_no_step, [group], LONGEST, backends, device)
    variant = (Candidate(name),)
    builder.reserve([(batch, variant)])
    built = builder.build(batch, variant, inputs)
    built.plan()  # the first one may compile
    return _median_us(lambda step: built.plan(), device)


def _median_us(work: Callable[[int], object], device: torch.device) -> float:
    times = []
    for step in range(REPEATS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # or the host would wait for what came before
        start = perf_counter_ns()
        work(step)
        times.append((perf_counter_ns() - start) / 1e3)
    return statistics.median(times)
