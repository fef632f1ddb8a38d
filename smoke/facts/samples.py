"""What samples files say to the facts of DESIGN 2. Pure; needs numpy alone.

Times are compared with FA3's of the same round. A single request is as long as the mean, whatever the profile, so at
batch 1 the cells of equal lengths stand for all profiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dispatch.candidate import Candidate
from dispatch.evidence import median_of_rounds
from dispatch.regimes import decide
from dispatch.samples import TWIN, BucketSamples, Samples, log_of_times
from dispatch.spec import AttentionSpec
from dispatch.subcells import Subcells

BASE = "fa3"
EQUAL, TRACES = "equal", "trace"  # TRACES: how the names of their profiles begin
RAGGED = ("lognormal-0.7", "lognormal-1.2", TRACES)
COMPARED = (BASE, "flashinfer_cudnn", "flashinfer_xqa", "flashinfer_fa2_tc")  # those of the data
LARGE_BYTES = 200e6  # of KV a layer: a kernel is then bound by memory alone

Floats = NDArray[np.float64]
Cost = Callable[[BucketSamples, int], Floats]
"""Microseconds of a step, [candidate, cell, round], of so many layers."""


def step_cost(bucket: BucketSamples, layers: int) -> Floats:
    """What the harness compares: plan(), begin_step and kernels."""
    return bucket.step_us(layers)


def kernel_cost(bucket: BucketSamples, layers: int) -> Floats:
    """Without plan(), as in DESIGN's data."""
    cost: Floats = bucket.times[1] + layers * bucket.times[2]
    return cost


@dataclass(frozen=True)
class Speeds:
    """Over cells: t_fa3 / t_pick, its geometric mean and the worst; `unmeasured` cells had no time of the pick."""

    mean: float
    worst: float
    cells: int
    unmeasured: int


@dataclass(frozen=True)
class Ratios:
    """Over cells: t_backend / t_fa3."""

    geometric_mean: float
    mean: float
    least: float
    most: float
    cells: int


@dataclass(frozen=True)
class Gain:
    """Over cells: t_fa3 / t_best."""

    mean: float
    share_over_10_percent: float
    most: float
    cells: int


def log_ratios(bucket: BucketSamples, layers: int, cost: Cost) -> Floats:
    """Median over rounds of log(t candidate / t FA3), [candidate, cell]; NaN where not measured."""
    log = log_of_times(cost(bucket, layers))
    return median_of_rounds(log - log[bucket.candidates.index(BASE)])


def equal_tuned(samples: Samples, cost: Cost) -> Speeds:
    """A plan of what is fastest at equal lengths, a bucket and mean KV at a time, on ragged batches."""

    def picks(bucket: BucketSamples, ratios: Floats) -> Iterator[tuple[int, int]]:
        whole = [i for i, name in enumerate(bucket.candidates) if name != TWIN and Candidate.parse(name).max_kv is None]
        for equal, ragged in _equal_and_ragged(bucket):
            measured = [i for i in whole if np.isfinite(ratios[i, equal])]
            if measured:
                pick = min(measured, key=lambda i: ratios[i, equal])
                yield from ((pick, c) for c in ragged)

    return _speeds(samples, cost, picks)


def own_rule(samples: Samples, cost: Cost) -> Speeds:
    """What our rule picks from the same samples, in the parts of the same ragged cells."""
    regimes = decide(samples)
    whole = {
        b.bucket: (Subcells.of(b), [c for _, cells in _equal_and_ragged(b) for c in cells]) for b in samples.buckets
    }

    def picks(bucket: BucketSamples, ratios: Floats) -> Iterator[tuple[int, int]]:
        parts, ragged = whole[bucket.bucket]
        for regime in regimes[bucket.bucket]:
            row = bucket.candidates.index(regime.decision.candidate)
            yield from ((row, c) for c in regime.cells if parts.source[c] in ragged)

    split = tuple(whole[b.bucket][0].split(b) for b in samples.buckets)
    return _speeds(replace(samples, buckets=split), cost, picks)


def backend_ratios(samples: Samples, cost: Cost) -> dict[str, Ratios]:
    """Each compared backend against FA3 over the trace's cells."""
    found = {}
    for name in COMPARED[1:]:
        logs = [
            log_ratios(bucket, samples.num_layers, cost)[bucket.candidates.index(name), c]
            for bucket in samples.buckets
            if name in bucket.candidates
            for c in trace_cells(bucket)
        ]
        ratios = np.exp([log for log in logs if np.isfinite(log)])
        if ratios.size:
            geometric = float(np.exp(np.log(ratios).mean()))
            found[name] = Ratios(
                geometric, float(ratios.mean()), float(ratios.min()), float(ratios.max()), int(ratios.size)
            )
    return found


def best_gain(samples: Samples, cost: Cost, buckets: Sequence[int] = ()) -> Gain | None:
    """The fastest of the compared backends over FA3, in the trace's cells of these buckets (of all if none)."""
    gains: list[float] = []
    for bucket in samples.buckets:
        if buckets and bucket.bucket not in buckets:
            continue
        rows = [bucket.candidates.index(name) for name in COMPARED if name in bucket.candidates]
        ratios = log_ratios(bucket, samples.num_layers, cost)[rows]
        cells = [c for c in trace_cells(bucket) if np.isfinite(ratios[:, c]).any()]
        gains += [float(np.exp(-np.nanmin(ratios[:, c]))) for c in cells]
    if not gains:
        return None
    return Gain(float(np.mean(gains)), float(np.mean([g > 1.1 for g in gains])), max(gains), len(gains))


def fastest_bandwidth(samples: Samples) -> list[tuple[int, int, float, float]]:
    """(bucket, mean KV, bytes of KV a layer, TB/s of the fastest candidate's layer) of each cell.

    Cells whose lengths were clipped at the longest served are left out: their mean is below their point's.
    """
    spec, longest = AttentionSpec.from_json(dict(samples.key["spec"])), samples.key["max_seq_len"]
    found = []
    for bucket in samples.buckets:
        rows = [i for i, name in enumerate(bucket.candidates) if name != TWIN]
        layer_us = median_of_rounds(bucket.times[2])[rows]
        for c, cell in enumerate(bucket.cells):
            us = layer_us[:, c][layer_us[:, c] > 0]
            if us.size and (cell.profile == EQUAL or cell.max_kv < longest):
                kv_bytes = bucket.bucket * cell.mean_kv * spec.kv_bytes_per_token
                found.append((bucket.bucket, cell.mean_kv, float(kv_bytes), float(kv_bytes / us.min() / 1e6)))
    return found


def trace_cells(bucket: BucketSamples) -> list[int]:
    """Indices of the cells whose lengths are the trace's."""
    wanted = (EQUAL, TRACES) if bucket.bucket == 1 else (TRACES,)
    return [c for c, cell in enumerate(bucket.cells) if cell.profile.startswith(wanted)]


def _equal_and_ragged(bucket: BucketSamples) -> Iterator[tuple[int, list[int]]]:
    """For each mean KV, its cell of equal lengths and its ragged ones."""
    points: Mapping[int, int] = {cell.mean_kv: c for c, cell in enumerate(bucket.cells) if cell.profile == EQUAL}
    for mean_kv, equal in points.items():
        yield (
            equal,
            [c for c, cell in enumerate(bucket.cells) if cell.mean_kv == mean_kv and cell.profile.startswith(RAGGED)],
        )


def _speeds(
    samples: Samples, cost: Cost, picks: Callable[[BucketSamples, Floats], Iterator[tuple[int, int]]]
) -> Speeds:
    logs: list[float] = []
    for bucket in samples.buckets:
        ratios = log_ratios(bucket, samples.num_layers, cost)
        logs += [float(-ratios[row, c]) for row, c in picks(bucket, ratios)]
    measured = [log for log in logs if np.isfinite(log)]
    if not measured:
        raise ValueError("no cell with ragged lengths")
    return Speeds(
        float(np.exp(np.mean(measured))), float(np.exp(min(measured))), len(measured), len(logs) - len(measured)
    )
