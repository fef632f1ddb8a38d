"""Which graph variants a bucket wants: the combinations of candidates that the groups' plans name together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from dispatch.candidate import Candidate
from dispatch.plan import DecidedBox, StoredPlan

Variant = tuple[Candidate, ...]
"""A candidate for each layer group."""

MOST_EXTRA = 3  # beside the default's own


def extra_variants(plans: Sequence[StoredPlan | None], defaults: Variant, bucket: int) -> list[Variant]:
    """Those beside the default's, the one that gains most first.

    Of several groups, what their boxes choose wherever they overlap, and the default of a group where it has no box.
    """
    boxes: list[list[DecidedBox | None]] = []
    for plan in plans:
        own: list[DecidedBox | None] = [] if plan is None else [d for d in plan.boxes if d.box.bucket == bucket]
        boxes.append([*own, None])
    gains: dict[Variant, float] = {}
    for chosen in product(*boxes):
        if _overlap([d for d in chosen if d is not None]):
            variant = tuple(
                default if d is None else Candidate.parse(d.box.candidate)
                for d, default in zip(chosen, defaults, strict=True)
            )
            gain = sum(d.speedup - 1 for d in chosen if d is not None)
            gains[variant] = max(gain, gains.get(variant, 0.0))
    gains.pop(defaults, None)
    return sorted(gains, key=lambda variant: -gains[variant])[:MOST_EXTRA]


def _overlap(boxes: Sequence[DecidedBox]) -> bool:
    """Whether some (mean KV, skew) lies in all of them."""
    if not boxes:
        return True
    mean = max(d.box.mean_kv_min for d in boxes) <= min(d.box.mean_kv_max for d in boxes)
    return mean and max(d.box.skew_min for d in boxes) <= min(d.box.skew_max for d in boxes)
