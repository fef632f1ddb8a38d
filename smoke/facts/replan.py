"""A plan decided anew from a tuning run's samples, scored on batches that `compare` has timed: no GPU is needed.

    python -m smoke.facts.replan SAMPLES COMPARISON

COMPARISON is what `compare --out` wrote for a plan of the same layers and buckets; it holds every candidate's times. So
a change of the deciding rule can be judged on real batches that it has not seen. A plan is decided from the general
length profiles alone, and where SAMPLES has those of a trace that was compared, from the general ones and that trace.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np

from dispatch.bench.compare import PLAN, Snapshot
from dispatch.bench.compare_summary import SLOWER
from dispatch.regimes import decide
from dispatch.samples import BucketSamples, Samples
from dispatch.samplesfile import read_samples

TRACES = "trace"  # how the names of their profiles begin


def speeds(samples: Samples, snapshots: Sequence[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """Of each snapshot, as Snapshot.to_json writes it: its trace, and how fast it is over the default's time."""
    regimes, found = decide(samples), []
    for each in snapshots:
        boxes = [regime.box for regime in regimes.get(each["bucket"], ())]
        planned = next((box.candidate for box in boxes if box.holds(each["mean_kv"], each["max_kv"])), None)
        snapshot = Snapshot(
            *(each[name] for name in ("trace", "bucket", "batch", "mean_kv", "max_kv", "kv_bytes_per_layer")),
            candidates=tuple(each["step_us"]),
            step_us=np.array(list(each["step_us"].values()), dtype=float),
            planned=planned,
            equal=None,
        )
        speed = snapshot.speed(PLAN, samples.default)
        if speed is not None:
            found.append((snapshot.trace, speed.speed))
    return found


def keep(samples: Samples, keeps: Callable[[str], bool]) -> Samples:
    """The cells of some length profiles alone."""
    return replace(samples, buckets=tuple(_cells_of(bucket, keeps) for bucket in samples.buckets))


def _cells_of(bucket: BucketSamples, keeps: Callable[[str], bool]) -> BucketSamples:
    kept = [c for c, cell in enumerate(bucket.cells) if keeps(cell.profile)]
    return replace(
        bucket,
        cells=tuple(bucket.cells[c] for c in kept),
        times=bucket.times[:, :, kept],
        longest=bucket.longest[kept],
        means=bucket.means[kept],
        exclusions=tuple(
            e if e.cell is None else replace(e, cell=kept.index(e.cell))
            for e in bucket.exclusions
            if e.cell is None or e.cell in kept
        ),
    )


def summary(found: Sequence[float]) -> str:
    """Geometric mean, worst, and shares below 0.99 and 0.97."""
    all_of_them = np.array(found)
    below = ", ".join(f"{(all_of_them < limit).mean():.1%} below {limit}x" for limit in SLOWER)
    mean, worst = geometric_mean(found), all_of_them.min()
    return f"{mean:.3f}x over the default, worst {worst:.3f}x, of {len(all_of_them)} batches; {below}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m smoke.facts.replan", description=__doc__)
    parser.add_argument("samples", type=Path)
    parser.add_argument("comparison", type=Path, help="JSON, gzipped or not")
    options = parser.parse_args(arguments)
    (samples,) = read_samples(options.samples)
    content = options.comparison.read_bytes()
    (compared,) = json.loads(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content)["comparisons"]
    snapshots, profiles = compared["snapshots"], {cell.profile for b in samples.buckets for cell in b.cells}
    _print("general profiles", speeds(keep(samples, lambda name: not name.startswith(TRACES)), snapshots))
    served = []
    for trace in dict.fromkeys(each["trace"] for each in snapshots):
        if (its := f"{TRACES}-{trace}") in profiles:
            with_it = keep(samples, lambda name, its=its: not name.startswith(TRACES) or name == its)
            served += speeds(with_it, [each for each in snapshots if each["trace"] == trace])
    if served:
        _print("general profiles and the trace that is served", served)


def _print(tuned_on: str, found: Sequence[tuple[str, float]]) -> None:
    print(f"tuned on the {tuned_on}")
    for trace in dict.fromkeys(trace for trace, _ in found):
        print(f"  {trace}: {summary([speed for name, speed in found if name == trace])}")
    print(f"  all: {summary([speed for _, speed in found])}")


if __name__ == "__main__":
    main()
