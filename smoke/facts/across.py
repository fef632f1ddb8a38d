"""A plan decided from a tuning run's samples, scored on the rounds of another run of the same layer: no GPU is needed.

    python -m smoke.facts.across SAMPLES OTHER

A batch of OTHER counts where there is a time of what the plan serves it with.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dispatch.samples import Samples
from dispatch.samplesfile import read_samples
from smoke.facts.chosen import served
from smoke.facts.replan import summary


def speeds(decides: Samples, scores: Samples) -> list[float]:
    """How many times faster than the default the plan is, of each batch."""
    return [float(np.exp(-log)) for _, log, _ in served(decides, scores)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m smoke.facts.across", description=__doc__)
    parser.add_argument("samples", type=Path)
    parser.add_argument("other", type=Path)
    options = parser.parse_args(arguments)
    (samples,), (other,) = read_samples(options.samples), read_samples(options.other)
    print(summary(speeds(samples, other)))


if __name__ == "__main__":
    main()
