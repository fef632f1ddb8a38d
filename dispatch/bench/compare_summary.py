"""What snapshots say together: of a trace and batch size, of a trace, of all. Pure; needs numpy alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dispatch.bench.compare import BEST, BEST_FIXED, EQUAL_PLAN, PLAN, Snapshot, Speed

SLOWER = (0.99, 0.97)  # speeds over the default below which snapshots are counted
LARGE_BYTES = 200e6  # of KV a layer: a kernel is then bound by memory alone


@dataclass(frozen=True, slots=True)
class Speeds:
    """Of one arm over another: geometric mean and least over so many snapshots."""

    mean: float
    worst: float
    snapshots: int

    @classmethod
    def of(cls, speeds: Sequence[Speed | None]) -> Speeds | None:
        """None: in no snapshot do both have times."""
        found = [each.speed for each in speeds if each is not None]
        return cls(float(np.exp(np.mean(np.log(found)))), min(found), len(found)) if found else None


@dataclass(frozen=True, slots=True)
class Below:
    """The share of snapshots with a speed below a limit. `surely`: their interval lies below it; `possibly`: a part."""

    limit: float
    share: float
    surely: float
    possibly: float

    @classmethod
    def of(cls, limit: float, speeds: Sequence[Speed | None]) -> Below:
        """Of those that have a speed."""
        found = [each for each in speeds if each is not None]
        count = len(found) or 1
        parts = ([each.speed for each in found], [each.high for each in found], [each.low for each in found])
        return cls(limit, *(sum(speed < limit for speed in part) / count for part in parts))


@dataclass(frozen=True)
class Summary:
    """Of some snapshots. The plan's speeds, by arm, over it; those of each arm over the default.

    `noise`: the default's second run over its first; `noise_below`, as `below`, of it. `floor_share`: the time that
    reading the KV caches must take over the plan's, geometric mean. `large`: the plan over the best backend where a
    layer has more than LARGE_BYTES. `served`: how many snapshots the plan serves with what.
    """

    snapshots: int
    plan_over: Mapping[str, Speeds]
    over_default: Mapping[str, Speeds]
    below: tuple[Below, ...]
    noise: Speeds | None
    noise_below: tuple[Below, ...]
    floor_share: float
    large: Speeds | None
    served: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def arms_of(snapshots: Sequence[Snapshot]) -> tuple[str, ...]:
    """All that a plan is compared with: the default first, the other fixed backends, and what no engine can know."""
    fixed = dict.fromkeys(name for snapshot in snapshots for name in snapshot.fixed)
    return (*fixed, EQUAL_PLAN, BEST, BEST_FIXED)


def summarise(snapshots: Sequence[Snapshot], num_layers: int, read_bytes_per_s: float) -> Summary:
    """Of at least one snapshot, all of one default."""
    arms, default = arms_of(snapshots), snapshots[0].candidates[0]
    plan_over = {arm: Speeds.of([s.speed(PLAN, arm) for s in snapshots]) for arm in arms}
    over_default = {arm: Speeds.of([s.speed(arm, default) for s in snapshots]) for arm in arms}
    gains, noise = [s.speed(PLAN, default) for s in snapshots], [s.noise for s in snapshots]
    large = [s.speed(PLAN, BEST_FIXED) for s in snapshots if s.kv_bytes > LARGE_BYTES]
    return Summary(
        snapshots=len(snapshots),
        plan_over={arm: speeds for arm, speeds in plan_over.items() if speeds},
        over_default={arm: speeds for arm, speeds in over_default.items() if speeds},
        below=tuple(Below.of(limit, gains) for limit in SLOWER),
        noise=Speeds.of(noise),
        noise_below=tuple(Below.of(limit, noise) for limit in SLOWER),
        floor_share=float(np.exp(np.mean([_log_floor_share(s, num_layers, read_bytes_per_s) for s in snapshots]))),
        large=Speeds.of(large),
        served=dict(Counter(s.served for s in snapshots)),
    )


def _log_floor_share(snapshot: Snapshot, num_layers: int, read_bytes_per_s: float) -> float:
    plan_us = snapshot.median_us(PLAN)
    assert plan_us is not None  # a snapshot has at least the default's time
    return float(np.log(num_layers * snapshot.kv_bytes / read_bytes_per_s * 1e6 / plan_us))
