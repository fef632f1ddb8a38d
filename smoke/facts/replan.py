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
from typing import Any

import numpy as np

from dispatch.regimes import decide
from dispatch.samples import TWIN, Samples
from dispatch.samplesfile import read_samples


def speeds(samples: Samples, snapshots: Sequence[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """Of each snapshot: its trace, and the speed over the default of what the plan serves it with; 1 for the default.

    The median over rounds of the default's time, the mean of its two, over the candidate's.
    """
    regimes, found = decide(samples), []
    for snapshot in snapshots:
        boxes = [regime.box for regime in regimes.get(snapshot["bucket"], ())]
        held = (box.candidate for box in boxes if box.holds(snapshot["mean_kv"], snapshot["max_kv"]))
        name, step_us = next(held, samples.default), snapshot["step_us"]
        speed = 1.0
        if name != samples.default:
            log = {arm: np.log(np.array(step_us[arm], dtype=float)) for arm in (samples.default, TWIN, name)}
            speed = float(np.exp(np.nanmedian((log[samples.default] + log[TWIN]) / 2 - log[name])))
        found.append((snapshot["trace"], speed))
    return found


def summary(found: Sequence[float]) -> str:
    """Geometric mean, worst, and shares below 0.99 and 0.97."""
    all_of_them = np.array(found)
    mean = float(np.exp(np.log(all_of_them).mean()))
    below = ", ".join(f"{(all_of_them < limit).mean():.1%} below {limit}x" for limit in (0.99, 0.97))
    return f"{mean:.3f}x over the default, worst {all_of_them.min():.3f}x, of {len(all_of_them)} batches; {below}"


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
