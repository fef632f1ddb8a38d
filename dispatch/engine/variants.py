"""Which graph variants a bucket wants: the combinations of candidates that the groups' plans name together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from math import log

from dispatch.candidate import Candidate
from dispatch.plan import StoredPlan

Variant = tuple[Candidate, ...]
"""A candidate for each layer group."""

MOST_EXTRA = 3  # of a bucket beside the default's own: graphs take memory, and time at each start
GAINS_LESS = f"{MOST_EXTRA} others of the bucket gain more"


def extra_variants(plans: Sequence[StoredPlan | None], defaults: Variant, bucket: int) -> list[Variant]:
    """Those beside the default's, the one that gains most first: the gain of its boxes, times the range of mean KV
    and of skew that it serves in them, both in logarithms. MOST_EXTRA of them get a graph.

    Of several groups, what their boxes choose for some (mean KV, skew), and the default of a group that has no box
    there.
    """
    groups = [[] if plan is None else [d for d in plan.boxes if d.box.bucket == bucket] for plan in plans]
    boxes = [d.box for own in groups for d in own]
    # Between two borders nothing changes: where a box begins, or another has just ended, stands for what follows.
    means = sorted({border for box in boxes for border in (box.mean_kv_min, box.mean_kv_max + 1)})
    skews = sorted({border for box in boxes for border in (box.skew_min, box.skew_max + 1)})
    gains: dict[Variant, float] = defaultdict(float)
    for mean, next_mean in pairwise(means):
        across = [[d for d in own if d.box.mean_kv_min <= mean <= d.box.mean_kv_max] for own in groups]
        for skew, next_skew in pairwise(skews):
            here = [next((d for d in own if d.box.skew_min <= skew <= d.box.skew_max), None) for own in across]
            variant = tuple(
                default if d is None else Candidate.parse(d.box.candidate)
                for d, default in zip(here, defaults, strict=True)
            )
            gain = sum(d.speedup - 1 for d in here if d is not None)
            gains[variant] += gain * log(next_mean / max(1, mean)) * log(next_skew / max(1, skew))
    gains.pop(defaults, None)
    return sorted(gains, key=lambda variant: -gains[variant])
