"""The tuner: eligible candidates, measured, decided, as a plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import monotonic

import torch

from dispatch.backends import Registry
from dispatch.bench.harness import ROUNDS, Bench, DefaultFailed
from dispatch.bench.memory import free_bytes
from dispatch.bench.profiles import PlannedCell
from dispatch.bench.timer import CpuTimer, Timer
from dispatch.conclude import conclude
from dispatch.device import DeviceFingerprint
from dispatch.eligible import Eligible, eligible
from dispatch.errors import MeasureError
from dispatch.plan import TIME_BUDGET_OVER, StoredPlan
from dispatch.request import TuneRequest
from dispatch.samples import Box, BucketSamples, Samples

_log = logging.getLogger(__name__)

ABOVE_CAPACITY = "above the KV capacity at every KV length"
ONE_CANDIDATE = "one candidate serves this layer: there is nothing to choose"

Progress = Callable[[int, int, str], None]
"""Told of samples done, samples in all, and what is going on."""


def silent(done: int, total: int, what: str) -> None:
    """A Progress that says nothing."""


def timer_for(device: DeviceFingerprint) -> Timer:
    """The timer of a kind of device. Raises MeasureError where there is none."""
    if device.kind == "cpu":
        return CpuTimer()
    raise MeasureError(f"measuring on {device.name} needs the GPU timer, which this version does not have")


def tune(
    request: TuneRequest,
    device: DeviceFingerprint,
    registry: Registry,
    progress: Progress = silent,
    resume: Samples | None = None,
    incumbent: Sequence[Box] = (),
) -> tuple[StoredPlan, Samples]:
    """Measure and decide. `resume`: the samples of a run that its time budget ended; `incumbent`: stored choices.

    Raises ConfigError and MeasureError before anything is measured; from then on, what fails is left to the default.
    """
    start = monotonic()
    able = eligible(request, device, registry)
    cells = {bucket: request.planned(bucket, ROUNDS) for bucket in request.buckets}
    unmeasured: dict[int, str] = {}
    for bucket in request.buckets:
        if not cells[bucket]:
            unmeasured[bucket] = ABOVE_CAPACITY
        elif len(able.candidates(bucket)) == 1:
            unmeasured[bucket] = ONE_CANDIDATE
    measured = {} if resume is None else {b.bucket: b for b in resume.buckets}
    todo = {b: cells[b] for b in request.buckets if b not in unmeasured and b not in measured}
    if todo:
        bench = _bench(request, device, registry, able, todo)
        _measure(bench, able, start + request.config.time_budget_s, progress, measured, unmeasured)
    samples = Samples(
        key=request.key(device, registry, able.default),
        num_layers=request.spec.num_layers,
        default=able.default,
        priority=registry.names(),
        rule=request.rule,
        buckets=tuple(measured[b] for b in request.buckets if b in measured),
        unmeasured={b: unmeasured[b] for b in request.buckets if b in unmeasured},
        incumbent=tuple(incumbent) if resume is None else resume.incumbent,
    )
    plan = conclude(samples, able.refused)
    return replace(plan, seconds=round(monotonic() - start, 3)), samples


def _bench(
    request: TuneRequest,
    device: DeviceFingerprint,
    registry: Registry,
    able: Eligible,
    cells: Mapping[int, tuple[PlannedCell, ...]],
) -> Bench:
    torch_device = torch.device(device.kind)
    return Bench(
        request.spec,
        cells,
        able.workspace_bytes,
        request.max_seq_len,
        registry,
        timer_for(device),
        torch_device,
        free_bytes(torch_device),
    )


def _measure(
    bench: Bench,
    able: Eligible,
    deadline: float,
    progress: Progress,
    measured: dict[int, BucketSamples],
    unmeasured: dict[int, str],
) -> None:
    """Measure bucket after bucket, the smallest first: that is where choosing pays most."""
    counts = {b: len(cells) * ROUNDS * (len(able.candidates(b)) + 1) for b, cells in bench.planned.items()}
    total, done = sum(counts.values()), 0
    for bucket in bench.planned:
        if monotonic() > deadline:
            unmeasured[bucket] = TIME_BUDGET_OVER
            continue
        progress(done, total, f"bucket {bucket}: checking numbers")

        def advance(samples: int, before: int = done, bucket: int = bucket) -> None:
            progress(before + samples, total, f"bucket {bucket}")

        try:
            samples = bench.measure(bucket, able.candidates(bucket), deadline, advance)
        except DefaultFailed as error:
            _log.warning("bucket %d keeps its default, which failed: %s", bucket, error)
            unmeasured[bucket] = str(error)
        else:
            if monotonic() > deadline:
                unmeasured[bucket] = TIME_BUDGET_OVER
            else:
                measured[bucket] = samples
        done += counts[bucket]
