"""The tuner: eligible candidates, measured, decided, as a plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from time import monotonic

import torch

from dispatch.backends import Registry
from dispatch.bench.harness import Bench, DefaultFailed, Planned
from dispatch.bench.memory import free_bytes, give_back
from dispatch.bench.phases import Phases
from dispatch.bench.profiles import PlannedCell
from dispatch.bench.rounds import ROUNDS
from dispatch.bench.sanity import GpuWatch, watch_for
from dispatch.bench.timer import CpuTimer, Timer
from dispatch.conclude import conclude
from dispatch.decision import Reason
from dispatch.device import DeviceFingerprint
from dispatch.eligible import Eligible, eligible
from dispatch.errors import MeasureError, one_line
from dispatch.isolation.limits import Limits
from dispatch.isolation.quarantine import Quarantine
from dispatch.isolation.trial import NONE_LEFT, Trial
from dispatch.plan import FAILED_NOW, TIME_BUDGET_OVER, StoredPlan, to_be_tried_again
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
    """The timer of a kind of device."""
    if device.kind == "cpu":
        return CpuTimer()
    from dispatch.bench.cuda_timer import CudaTimer

    return CudaTimer(torch.device(device.kind))


def tune(
    request: TuneRequest,
    device: DeviceFingerprint,
    registry: Registry,
    progress: Progress = silent,
    stored: Samples | None = None,
    incumbent: Sequence[Box] = (),
    again: bool = False,
    phases: Phases | None = None,
    quarantine: Quarantine | None = None,
    limits: Limits | None = None,
    left_s: float | None = None,
) -> tuple[StoredPlan, Samples]:
    """Measure and decide. `incumbent`: stored choices to be challenged.

    `stored`: samples of an earlier run. Its buckets are not measured once more, or with `again` they are, as far as
    the time budget goes. `phases`: told where the time goes. `quarantine`: candidates that are not to be tried; those
    that fail in a child process come to it. `limits`: of those processes. `left_s`: of the time budget, where other
    layer groups have had some of it. Raises ConfigError and MeasureError before anything is measured; from then on,
    what fails is left to the default.
    """
    start = monotonic()
    deadline = start + (request.config.time_budget_s if left_s is None else left_s)
    quarantine, phases = quarantine or Quarantine(), phases or Phases()
    able = eligible(request, device, registry)
    able = able.without(quarantine.refusals(able.default))
    cells = {bucket: request.planned(bucket, ROUNDS) for bucket in request.buckets}
    known = {} if stored is None else {b.bucket: b for b in stored.buckets}
    measured: dict[int, BucketSamples] = {} if again else dict(known)
    unmeasured: dict[int, str] = {}
    for bucket in request.buckets:
        if not cells[bucket]:
            unmeasured[bucket] = ABOVE_CAPACITY
        elif held := quarantine.get(able.default):
            unmeasured[bucket] = f"{held.reason.value}: the default {able.default}: {held.describe()}"
        elif len(able.candidates(bucket)) == 1:
            unmeasured[bucket] = ONE_CANDIDATE if len(able.tactics) == 1 else NONE_LEFT
    todo = {b: cells[b] for b in request.buckets if b not in unmeasured and b not in measured}
    if todo:
        watch = watch_for(device)
        _log.info("checks while tuning: %s", watch.describe())
        with phases("waiting for an idle GPU"):
            refusal = watch.refusal()
        if refusal:
            raise MeasureError(refusal)
        if request.config.isolation == "process":
            total = sum(_counts(able, todo).values())
            trial = Trial(request, device, registry, able, quarantine, limits or Limits(), phases)
            able, not_now = trial.run(list(todo), deadline, lambda what: progress(0, total, what))
            unmeasured |= not_now
            todo = {b: cells for b, cells in todo.items() if b not in unmeasured}
    if todo:
        try:
            bench = _bench(request, device, registry, able, todo, phases)
            named: dict[int, set[str]] = {}
            for box in incumbent:
                named.setdefault(box.bucket, set()).add(box.candidate)
            _measure(bench, able, watch, deadline, progress, named, measured, unmeasured)
            del bench
        finally:
            give_back(torch.device(device.kind))
    for bucket in [b for b, why in unmeasured.items() if to_be_tried_again(why) and b in known]:
        measured[bucket] = known[bucket]
        del unmeasured[bucket]
    samples = Samples(
        key=request.key(device, registry, able.default),
        num_layers=request.spec.num_layers,
        default=able.default,
        priority=registry.priority(device),
        rule=request.rule,
        buckets=tuple(measured[b].without(able.refused) for b in request.buckets if b in measured),
        unmeasured={b: unmeasured[b] for b in request.buckets if b in unmeasured},
        incumbent=tuple(incumbent),
    )
    plan = conclude(samples, able.refused)
    return replace(plan, seconds=round(monotonic() - start, 3)), samples


def _bench(
    request: TuneRequest,
    device: DeviceFingerprint,
    registry: Registry,
    able: Eligible,
    cells: Mapping[int, tuple[PlannedCell, ...]],
    phases: Phases,
) -> Bench:
    torch_device = torch.device(device.kind)
    timer = timer_for(device)
    free = free_bytes(torch_device)
    try:
        sizes = able.workspace_bytes
        return Bench(
            request.spec,
            cells,
            sizes,
            request.max_seq_len,
            registry,
            timer,
            torch_device,
            free,
            phases,
            request.traits,
        )
    except (MemoryError, RuntimeError) as error:  # torch's out-of-memory error is a RuntimeError
        raise MeasureError(f"no memory to measure with: {error}".splitlines()[0]) from None


def _measure(
    bench: Bench,
    able: Eligible,
    watch: GpuWatch,
    deadline: float,
    progress: Progress,
    stored: Mapping[int, Collection[str]],
    measured: dict[int, BucketSamples],
    unmeasured: dict[int, str],
) -> None:
    """Measure bucket after bucket, the smallest first: that is where choosing pays most.

    `stored`: the candidates of each bucket's stored boxes.
    """
    counts = _counts(able, bench.planned)
    total, done, throttled = sum(counts.values()), 0, ""
    for bucket in bench.planned:
        if throttled:  # the card has to cool down; nothing that is measured until then would count
            unmeasured[bucket] = f"{FAILED_NOW}: {throttled}"
            continue
        if monotonic() > deadline:
            unmeasured[bucket] = TIME_BUDGET_OVER
            continue
        progress(done, total, f"bucket {bucket}: checking numbers")

        def advance(samples: int, before: int = done, bucket: int = bucket) -> None:
            progress(before + samples, total, f"bucket {bucket}")
            nonlocal throttled
            if throttled := watch.throttling():  # the driver tells it of this moment only: ask after every cell
                raise MeasureError(throttled)

        try:
            samples = bench.measure(bucket, able.candidates(bucket), deadline, advance, stored.get(bucket, ()))
        except DefaultFailed as error:
            _log.warning("bucket %d keeps its default, which failed: %s", bucket, error)
            unmeasured[bucket] = f"{FAILED_NOW if error.reason is Reason.FAILED else error.reason.value}: {error}"
        except Exception as error:  # memory, most likely; it costs this bucket its measurement, and nothing else
            why = str(error) if isinstance(error, MeasureError) else one_line(error)
            _log.warning("bucket %d keeps its default: %s", bucket, why)
            unmeasured[bucket] = f"{FAILED_NOW}: {why}"
        else:
            if monotonic() > deadline and bench.complete_rounds < ROUNDS:  # some bins would lack theirs
                unmeasured[bucket] = TIME_BUDGET_OVER
            else:
                measured[bucket] = samples
        done += counts[bucket]


def _counts(able: Eligible, planned: Planned) -> dict[int, int]:
    """Samples of each bucket."""
    return {b: len(cells) * ROUNDS * (len(able.candidates(b)) + 1) for b, cells in planned.items()}
