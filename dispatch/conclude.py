"""From samples to a plan: every measured bucket decided. Pure; needs neither torch nor a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone

from dispatch.decision import Reason
from dispatch.plan import DecidedBox, Excluded, StoredPlan
from dispatch.regimes import decide
from dispatch.samples import TWIN, Samples

DEFAULT_NOT_TIMED = "the default has no valid time"


def conclude(samples: Samples, refused: Mapping[str, str]) -> StoredPlan:
    """The plan of a run. `refused`: backends that do not serve the layer, with the reason."""
    decided = decide(samples)
    untimed = {bucket: DEFAULT_NOT_TIMED for bucket, regimes in decided.items() if not regimes}
    return StoredPlan(
        key=samples.key,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        default=samples.default,
        buckets=tuple(samples.key["buckets"]),
        boxes=tuple(
            DecidedBox(regime.box, regime.decision.reason, round(regime.speedup, 4))
            for regimes in decided.values()
            for regime in regimes
        ),
        unmeasured={**samples.unmeasured, **untimed},
        excluded=tuple(
            Excluded(b.bucket, e.candidate, e.reason, e.detail)
            for b in samples.buckets
            for e in b.exclusions
            # the twin is no candidate; and that one is far slower somewhere is what the samples are for
            if e.candidate != TWIN and e.reason is not Reason.DROPPED
        ),
        refused=refused,
    )
