"""The plan that tuning on equal lengths gives, from the samples of a tuning run. Pure; needs numpy alone."""

from __future__ import annotations

import math

from dispatch.bench.profiles import LogNormal
from dispatch.candidate import Candidate
from dispatch.evidence import median_of_rounds
from dispatch.samples import TWIN, Samples

EQUAL = LogNormal(0.0).name


def equal_choices(samples: Samples) -> dict[int, str]:
    """Of each measured bucket, the candidate with the least mean time over the KV grid, all requests equally long.

    So do other tuners choose: one winner a batch size. They time single launches over one hot page, though; our times
    are of chains of layers over pages of their own, which is kinder to their choice. Candidates for short requests
    alone, and those that were not timed at every length, are left out.
    """
    chosen = {}
    for bucket in samples.buckets:
        cells = [c for c, cell in enumerate(bucket.cells) if cell.profile == EQUAL]
        if not cells:
            continue
        means = median_of_rounds(bucket.step_us(samples.num_layers)[:, cells]).mean(axis=1).tolist()
        timed = {
            name: us for name, us in zip(bucket.candidates, means, strict=True) if name != TWIN and _anywhere(name)
        }
        timed = {name: us for name, us in timed.items() if not math.isnan(us)}
        if timed:
            chosen[bucket.bucket] = min(timed, key=timed.__getitem__)
    return chosen


def _anywhere(name: str) -> bool:
    return Candidate.parse(name).max_kv is None
