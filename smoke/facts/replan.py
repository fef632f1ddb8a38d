"""A plan decided anew from a tuning run's samples, scored on batches that `compare` has timed: no GPU is needed.

    python -m smoke.facts.replan SAMPLES COMPARISON

COMPARISON is what `compare --out` wrote for the plan of SAMPLES; it holds every candidate's times. So a change of the
deciding rule can be judged on real batches that it has not seen.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np

from dispatch.bench.compare import PLAN, Snapshot
from dispatch.bench.compare_summary import SLOWER
from dispatch.regimes import decide
from dispatch.samples import Samples
from dispatch.samplesfile import read_samples


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
    found = speeds(samples, compared["snapshots"])
    for trace in dict.fromkeys(trace for trace, _ in found):
        print(f"{trace}: {summary([speed for name, speed in found if name == trace])}")
    print(f"all: {summary([speed for _, speed in found])}")


if __name__ == "__main__":
    main()
