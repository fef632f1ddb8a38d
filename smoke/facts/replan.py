"""A plan decided anew from a tuning run's samples, scored on batches that `compare` has timed: no GPU is needed.

    python -m smoke.facts.replan SAMPLES COMPARISON...

COMPARISON is what `compare --out` wrote for a plan of the same layers and buckets; it holds every candidate's times.
Several count as one. So a change of the deciding rule can be judged on real batches that it has not seen. A plan is
decided from the general length profiles alone, and where SAMPLES has those of a trace that was compared, from the
general ones and that trace.
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

from dispatch.bench.compare import BEST, BEST_FIXED, PLAN, Snapshot
from dispatch.bench.compare_summary import LARGE_BYTES, SLOWER
from dispatch.regimes import decide
from dispatch.samples import BucketSamples, Samples
from dispatch.samplesfile import read_samples

TRACES = "trace"  # how the names of their profiles begin


def comparison_of(path: Path) -> Any:
    """The one of a file that `compare --out` wrote for a plan of one layer, gzipped or not."""
    content = path.read_bytes()
    (compared,) = json.loads(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content)["comparisons"]
    return compared


def replanned(samples: Samples, snapshots: Sequence[Mapping[str, Any]]) -> list[Snapshot]:
    """Snapshots, as Snapshot.to_json writes them, with what these samples plan for them; those with a time of it."""
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
        if snapshot.speed(PLAN, samples.default) is not None:
            found.append(snapshot)
    return found


def speeds(snapshots: Sequence[Snapshot], arm: str, over: str) -> list[float]:
    """How fast an arm is over another, where both have times."""
    return [speed.speed for each in snapshots if (speed := each.speed(arm, over)) is not None]


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
    parser.add_argument("comparisons", type=Path, nargs="+", help="JSON, gzipped or not")
    options = parser.parse_args(arguments)
    (samples,) = read_samples(options.samples)
    snapshots = [its for path in options.comparisons for its in comparison_of(path)["snapshots"]]
    profiles = {cell.profile for b in samples.buckets for cell in b.cells}
    general = replanned(keep(samples, lambda name: not name.startswith(TRACES)), snapshots)
    _print("general profiles", general, samples.default)
    for batch in sorted({its.batch for its in general}):
        some = [its for its in general if its.batch == batch]
        plan, best = (geometric_mean(speeds(some, arm, samples.default)) for arm in (PLAN, BEST))
        print(f"  batch {batch}: {plan:.3f}x, the best of each {best:.3f}x")
    if large := [its for its in general if its.kv_bytes > LARGE_BYTES]:
        ours = geometric_mean(speeds(large, PLAN, BEST_FIXED))
        print(f"  over 200 MB of KV a layer: {ours:.3f}x of the best backend of each, {len(large)} batches")
    served = []
    for trace in dict.fromkeys(each["trace"] for each in snapshots):
        if (its := f"{TRACES}-{trace}") in profiles:
            with_it = keep(samples, lambda name, its=its: not name.startswith(TRACES) or name == its)
            served += replanned(with_it, [each for each in snapshots if each["trace"] == trace])
    if served:
        _print("general profiles and the trace that is served", served, samples.default)


def _print(tuned_on: str, found: Sequence[Snapshot], default: str) -> None:
    print(f"tuned on the {tuned_on}")
    for trace in dict.fromkeys(its.trace for its in found):
        print(f"  {trace}: {summary(speeds([its for its in found if its.trace == trace], PLAN, default))}")
    print(f"  all: {summary(speeds(found, PLAN, default))}")


if __name__ == "__main__":
    main()
