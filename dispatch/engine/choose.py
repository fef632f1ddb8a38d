"""What the runner builds for a layer group: its default, and the plan where one is to be had."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

from dispatch._core import BackendPlan
from dispatch.backends import Registry
from dispatch.candidate import Candidate
from dispatch.config import DispatchConfig
from dispatch.device import DeviceFingerprint
from dispatch.eligible import eligible
from dispatch.engine.agree import difference, facts_of
from dispatch.engine.groups import LayerGroup
from dispatch.engine.ranks import Ranks
from dispatch.errors import DispatchError, one_line
from dispatch.obtain import SLACK_S, obtain_plan
from dispatch.plan import StoredPlan, to_be_tried_again
from dispatch.planfile import plan_from_json, plan_to_json
from dispatch.request import TuneRequest
from dispatch.store import Store

_log = logging.getLogger(__name__)

APART_S = 300.0  # how far apart ranks may come: each loads its weights, and compiles, at its own speed


def patience_s(config: DispatchConfig) -> float:
    """How long ranks wait for one another: the leader may wait for another process that tunes, and then tune itself."""
    return APART_S + 2 * (config.time_budget_s + SLACK_S)


@dataclass(frozen=True, slots=True)
class Choice:
    """`plan` and its frozen `table` are None where the group keeps its default everywhere; `why` then says so."""

    default: Candidate
    plan: StoredPlan | None = None
    table: BackendPlan | None = None
    why: str = ""

    def unmeasured(self, bucket: int) -> str:
        """Why the plan has nothing for a bucket; "" if it has, and where there is no plan."""
        return "" if self.plan is None else self.plan.unmeasured.get(bucket, "")


def choose(
    groups: Sequence[LayerGroup],
    request: TuneRequest,
    device: DeviceFingerprint,
    registry: Registry,
    refusal: str,
    ranks: Ranks,
) -> list[Choice]:
    """For each group, the plan that the leader loads or tunes: on all ranks, or on none.

    `request` is the engine's, for any group; `refusal`: why this rank does not switch. A group that cannot have a plan
    keeps its default, with a line in the log. Raises ConfigError and MeasureError where not even a default serves a
    group, and RanksError.
    """
    if refusal:  # what is never to be chosen does not matter then
        request = replace(request, config=replace(request.config, exclude=()))
    own = [replace(request, spec=group.spec, default=group.default or request.default) for group in groups]
    able = [eligible(one, device, registry) for one in own]
    defaults = [Candidate(each.default) for each in able]
    apart = difference(ranks, facts_of(own, able, device, registry, refusal))
    if apart:
        _log.warning("the default serves every step: %s", apart)
    if refusal or apart:
        return [Choice(default, why=refusal or apart) for default in defaults]
    leader = _Leader(device, registry, request.config.time_budget_s)
    return [
        _choose(one, default, leader, ranks, f"layer group {i}")
        for i, (one, default) in enumerate(zip(own, defaults, strict=True))
    ]


class _Leader:
    """What the leader obtains: of groups that are alike once, and of all of them within one time budget."""

    def __init__(self, device: DeviceFingerprint, registry: Registry, budget_s: float) -> None:
        self.device, self.registry, self.deadline = device, registry, monotonic() + budget_s
        self.obtained: dict[str, dict[str, Any]] = {}

    def obtain(self, request: TuneRequest) -> dict[str, Any]:
        """The plan and how it was come by, or why there is none; as JSON. It serves the same request again."""
        group = json.dumps([request.spec.to_json(), request.default])
        if group not in self.obtained:
            self.obtained[group] = self._obtain(request)
        return self.obtained[group]

    def _obtain(self, request: TuneRequest) -> dict[str, Any]:
        try:
            store = Store(request.config.cache_dir)
            left_s = max(0.0, self.deadline - monotonic())  # where there is nothing left, a stored plan still serves
            obtained = obtain_plan(request, self.device, self.registry, store, left_s=left_s)
            return {"why": "", "plan": plan_to_json(obtained.plan), "source": obtained.source}
        except Exception as error:  # the engine starts, whatever went wrong in measuring
            return {"why": _reason(error)}


def _choose(request: TuneRequest, default: Candidate, leader: _Leader, ranks: Ranks, group: str) -> Choice:
    told = leader.obtain(request) if ranks.is_leader else None
    told = ranks.from_leader(f"{group}: the plan", told)  # the others wait for it, and read no store
    plan, why = None, told["why"]
    if not why:
        try:
            plan = plan_from_json(told["plan"])
        except Exception as error:
            why = _reason(error)
    why = ranks.agreed(f"{group}: the plan is read", why)
    if why or plan is None:
        _log.warning("%s: the default %s serves every step: %s", request.spec.describe(), default, why)
        return Choice(default, why=why)
    _log.info("%s: plan %s", request.spec.describe(), told["source"])
    for reason in dict.fromkeys(plan.unmeasured.values()):
        buckets = ", ".join(str(bucket) for bucket, its in plan.unmeasured.items() if its == reason)
        level = logging.WARNING if to_be_tried_again(reason) else logging.INFO
        _log.log(level, "%s: the default %s serves bucket %s: %s", request.spec.describe(), default, buckets, reason)
    return Choice(default, plan, plan.table())


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, DispatchError) else one_line(error)
