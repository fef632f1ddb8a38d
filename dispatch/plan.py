"""StoredPlan: the decisions for one layer group, what they are valid for, and the C++ table made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dispatch._core import BackendPlan
from dispatch.candidate import Candidate
from dispatch.decision import Reason
from dispatch.samples import Box
from dispatch.spec import AttentionSpec

TIME_BUDGET_OVER = "the time budget ended before it was measured"
FAILED_NOW = "failed, to be tried again"


def to_be_tried_again(why_unmeasured: str) -> bool:
    """Whether the next run would measure a bucket that is without boxes for this reason."""
    return why_unmeasured == TIME_BUDGET_OVER or why_unmeasured.startswith(FAILED_NOW)


@dataclass(frozen=True, slots=True)
class DecidedBox:
    """A box, why its candidate was chosen, and the cross-fitted speed of the choice over the default."""

    box: Box
    reason: Reason
    speedup: float


@dataclass(frozen=True, slots=True)
class Excluded:
    """A candidate that could not be chosen in a bucket, and why."""

    bucket: int
    candidate: str
    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class StoredPlan:
    """Plain data. `key`: what the plan is valid for. `created`: ISO 8601, UTC.

    `refused`: backends that do not serve the layer. `unmeasured`: buckets without boxes. Both with the reason.
    `seconds`: what measuring took.
    """

    key: Mapping[str, Any]
    created: str
    default: str
    buckets: tuple[int, ...]
    boxes: tuple[DecidedBox, ...]
    unmeasured: Mapping[int, str] = field(default_factory=dict)
    excluded: tuple[Excluded, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def spec(self) -> AttentionSpec:
        """The layer group that the plan is for."""
        return AttentionSpec.from_json(self.key["spec"])

    @property
    def is_partial(self) -> bool:
        """Whether buckets are left that a further run would measure."""
        return any(map(to_be_tried_again, self.unmeasured.values()))

    def table(self) -> BackendPlan:
        """The frozen C++ table. Raises PlanError where the boxes do not fit one another."""
        plan = BackendPlan(list(self.buckets), sorted(self.key["backends"]))
        for box in (decided.box for decided in self.boxes):
            candidate = Candidate.parse(box.candidate)
            plan.set(
                bucket=box.bucket,
                mean_kv_min=box.mean_kv_min,
                mean_kv_max=box.mean_kv_max,
                skew_min=box.skew_min,
                skew_max=box.skew_max,
                backend=candidate.backend,
                tactic=candidate.tactic,
            )
        plan.freeze()
        return plan
