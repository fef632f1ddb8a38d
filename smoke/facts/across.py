"""A plan decided from a tuning run's samples, scored on the rounds of another run of the same layer: no GPU is needed.

    python -m smoke.facts.across SAMPLES OTHER

A batch of OTHER counts where there is a time of what the plan serves it with.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dispatch.conclude import conclude
from dispatch.plan import StoredPlan
from dispatch.samples import Samples, log_of_times
from dispatch.samplesfile import read_samples
from smoke.facts.fast import chosen
from smoke.facts.replan import summary


def speeds(plan: StoredPlan, samples: Samples) -> list[float]:
    """How many times faster the plan is than the default, of each batch."""
    found: list[float] = []
    for its in samples.buckets:
        if its.bucket not in plan.buckets:
            continue
        log, own = log_of_times(its.step_us(samples.num_layers)), np.nonzero(its.longest)
        served = [its.candidates.index(name) if name in its.candidates else -1 for name in chosen(plan, its)]
        gain = np.where(np.array(served) < 0, np.nan, log[0][own] - log[(served, *own)])
        found += np.exp(gain[np.isfinite(gain)]).tolist()
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m smoke.facts.across", description=__doc__)
    parser.add_argument("samples", type=Path)
    parser.add_argument("other", type=Path)
    options = parser.parse_args(arguments)
    (samples,), (other,) = read_samples(options.samples), read_samples(options.other)
    print(summary(speeds(conclude(samples, {}), other)))


if __name__ == "__main__":
    main()
