"""A run of `compare`: is the plan for this machine, what traffic looks like, and every bucket in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dispatch._core import BackendPlan, batch_of
from dispatch.backends import Registry
from dispatch.bench.bandwidth import read_bytes_per_s
from dispatch.bench.compare import Snapshot
from dispatch.bench.compare_bench import CompareBench
from dispatch.bench.compare_plan import device_of, request_of
from dispatch.bench.comparison import Comparison, Row
from dispatch.bench.equal_plan import equal_choices
from dispatch.bench.harness import Planned
from dispatch.bench.memory import free_bytes
from dispatch.bench.sanity import GpuWatch, visible_bytes, watch_for
from dispatch.bench.trace import Trace
from dispatch.bench.traffic import SEED, Traffic, batches
from dispatch.candidate import Candidate
from dispatch.device import DeviceFingerprint
from dispatch.eligible import Eligible, eligible
from dispatch.errors import ConfigError, MeasureError
from dispatch.plan import StoredPlan
from dispatch.request import TuneRequest
from dispatch.samples import TWIN, Samples
from dispatch.spec import AttentionSpec
from dispatch.tuner import timer_for

NO_SAMPLES = "its samples are not beside the plan: there is no equal-length plan to compare with"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Batch sizes, ascending; snapshots of each trace and batch size, and rounds in which each of them is timed; the
    seed that the snapshots are drawn with."""

    batches: tuple[int, ...]
    snapshots: int
    rounds: int
    seed: int = SEED


def run_comparison(
    path: Path,
    plan: StoredPlan,
    samples: Samples | None,
    traces: Mapping[str, Trace],
    sizes: Sizes,
    registry: Registry,
    progress: Callable[[str], None],
) -> Comparison:
    """Compare a plan of the file `path` with its rivals. `samples`: what it was decided from.

    `progress` is told what is going on. Raises PlanFileError for a plan of another machine, ConfigError for a batch
    above its buckets, MeasureError where nothing can be measured.
    """
    fingerprint = device_of(plan, path, registry)
    if sizes.batches[-1] > plan.buckets[-1]:
        raise ConfigError(f"--batch-size {sizes.batches[-1]}: the largest bucket of {path} is {plan.buckets[-1]}")
    drawn = _draw(request_of(plan, path, plan.buckets), traces, sizes)
    by_bucket: dict[int, list[Traffic]] = {}
    for one in sorted(drawn, key=lambda one: one.batch):
        if len(one.lengths):
            by_bucket.setdefault(next(b for b in plan.buckets if b >= one.batch), []).append(one)
    if not by_bucket:
        raise MeasureError(f"no batch of these traces fits into the KV cache of {path}")
    request = request_of(plan, path, tuple(by_bucket))
    able, watch = eligible(request, fingerprint, registry), watch_for(fingerprint)
    if refusal := watch.refusal():
        raise MeasureError(refusal)
    cells = {b: tuple(cell for one in its for cell in one.cells(sizes.rounds)) for b, its in by_bucket.items()}
    bench, bandwidth = _bench(request, fingerprint, registry, able, cells)
    table, equal = plan.table(), {} if samples is None else equal_choices(samples)
    left_out = [] if samples is not None else [NO_SAMPLES]
    found: dict[tuple[str, int], list[Snapshot]] = {}
    for bucket, traffic in by_bucket.items():
        names, excluded = _candidates(plan, able, bucket)
        progress(f"bucket {bucket}: {len(cells[bucket])} snapshots; {', '.join(names)}")
        seen: set[str] = set()
        step_us, failed = bench.compare(bucket, names, _look(watch, seen))
        left_out += [*excluded, *failed, *(f"batch {bucket}: {why}" for why in sorted(seen) if why)]
        batches_of_bucket = ((one, lengths) for one in traffic for lengths in one.lengths)
        for i, (one, lengths) in enumerate(batches_of_bucket):
            its = _snapshot(table, plan.spec, one.trace, lengths, bucket, names, step_us[:, i], equal.get(bucket))
            found.setdefault((one.trace, one.batch), []).append(its)
    rows = [Row(t.trace, t.batch, t.share_that_fits, _timed(found.get((t.trace, t.batch), ()))) for t in drawn]
    return Comparison(str(path), plan, sizes.rounds, bandwidth, tuple(rows), able.refused, tuple(left_out))


def _draw(request: TuneRequest, traces: Mapping[str, Trace], sizes: Sizes) -> list[Traffic]:
    page_size, longest = request.spec.page_size, request.max_seq_len
    pages = request.capacity // page_size
    return [
        Traffic(name, batch, *batches(trace, batch, sizes.snapshots, longest, pages, page_size, sizes.seed))
        for name, trace in traces.items()
        for batch in sizes.batches
    ]


def _bench(
    request: TuneRequest, fingerprint: DeviceFingerprint, registry: Registry, able: Eligible, cells: Planned
) -> tuple[CompareBench, float]:
    """And the bandwidth of plain reads. Raises MeasureError where memory is short."""
    device = torch.device(fingerprint.kind)
    try:
        bandwidth, timer = read_bytes_per_s(device), timer_for(fingerprint)
        scratch, longest, free = able.workspace_bytes, request.max_seq_len, free_bytes(device)
        bench = CompareBench(request.spec, cells, scratch, longest, registry, timer, device, free, None, request.traits)
    except RuntimeError as error:  # torch's out-of-memory error is one
        raise MeasureError(f"no memory to measure with: {error}".splitlines()[0]) from None
    return bench, bandwidth


def _look(watch: GpuWatch, seen: set[str]) -> Callable[[int], None]:
    """Asks after every snapshot, for the driver tells of throttled clocks at that moment only."""
    return lambda done: seen.add(watch.throttling())


def _candidates(plan: StoredPlan, able: Eligible, bucket: int) -> tuple[tuple[str, ...], list[str]]:
    """Who is timed in a bucket, the default and its twin first; a line for each that is not.

    What was refused, failed or was wrong when the plan was made is not run again, unless a box of the bucket names it.
    """
    default, *others = able.candidates(bucket)
    named = {decided.box.candidate for decided in plan.boxes if decided.box.bucket == bucket}
    bad = {
        name: plan.refused[part]
        for name in others
        for part in (Candidate.parse(name).backend, name)
        if part in plan.refused
    }
    bad |= {e.candidate: f"{e.reason.value}: {e.detail}" for e in plan.excluded if e.bucket == bucket}
    lines = [f"batch {bucket}: {name}: {bad[name]}" for name in others if name in bad and name not in named]
    lines += [f"batch {bucket}: {name} is planned and not available" for name in sorted(named - {default, *others})]
    return (default, TWIN, *(name for name in others if name not in bad or name in named)), lines


def _snapshot(
    table: BackendPlan,
    spec: AttentionSpec,
    trace: str,
    lengths: NDArray[np.int64],
    bucket: int,
    candidates: tuple[str, ...],
    step_us: NDArray[np.float64],
    equal: str | None,
) -> Snapshot:
    """A batch and its times, with what the plan's table says to it."""
    rows, mean_kv, skew, longest = batch_of(lengths.astype(np.int32))
    entry = table.lookup(rows, mean_kv, skew)
    planned = None if entry is None else str(Candidate(entry.backend, entry.tactic))
    return Snapshot(
        trace, bucket, rows, mean_kv, longest, visible_bytes(spec, lengths), candidates, step_us, planned, equal
    )


def _timed(snapshots: Sequence[Snapshot]) -> tuple[Snapshot, ...]:
    """Those with a time to compare with."""
    return tuple(snapshot for snapshot in snapshots if snapshot.measured)
