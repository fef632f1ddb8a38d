"""From samples to a plan: every measured bucket decided. Pure; needs neither torch nor a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone

from dispatch.plan import DecidedBox, Excluded, StoredPlan
from dispatch.regimes import decide
from dispatch.samples import TWIN, Samples


def conclude(samples: Samples, refused: Mapping[str, str]) -> StoredPlan:
    """The plan of a run. `refused`: backends that do not serve the layer, with the reason."""
    return StoredPlan(
        key=samples.key,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        default=samples.default,
        buckets=tuple(samples.key["buckets"]),
        boxes=tuple(
            DecidedBox(regime.box, regime.decision.reason, round(regime.speedup, 4))
            for regimes in decide(samples).values()
            for regime in regimes
        ),
        unmeasured=samples.unmeasured,
        excluded=tuple(
            Excluded(b.bucket, e.candidate, e.reason, e.detail)
            for b in samples.buckets
            for e in b.exclusions
            if e.candidate != TWIN  # no candidate: nothing could choose it
        ),
        refused=refused,
    )
