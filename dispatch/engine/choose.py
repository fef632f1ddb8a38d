"""What the runner builds for a layer group: its default, and the plan where one is to be had."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dispatch._core import BackendPlan
from dispatch.backends import Registry
from dispatch.candidate import Candidate
from dispatch.device import DeviceFingerprint
from dispatch.eligible import eligible
from dispatch.engine.groups import LayerGroup
from dispatch.errors import DispatchError, one_line
from dispatch.obtain import obtain_plan
from dispatch.plan import StoredPlan
from dispatch.request import TuneRequest
from dispatch.store import Store

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Choice:
    """`plan` and its frozen `table` are None where the group keeps its default everywhere; `why` then says so."""

    default: Candidate
    plan: StoredPlan | None = None
    table: BackendPlan | None = None
    why: str = ""


def choose(
    groups: Sequence[LayerGroup],
    request: TuneRequest,
    device: DeviceFingerprint,
    registry: Registry,
    refusal: str,
) -> list[Choice]:
    """For each group, load the plan or tune. `request` is the engine's, for any group; `refusal`: why not to switch.

    A group that cannot have a plan keeps its default, with a line in the log. Raises ConfigError and MeasureError
    where not even a default serves a group.
    """
    if refusal:  # what is never to be chosen does not matter then
        request = replace(request, config=replace(request.config, exclude=()))
    own = [replace(request, spec=group.spec, default=group.default or request.default) for group in groups]
    return [_choose(one, device, registry, refusal) for one in own]


def _choose(request: TuneRequest, device: DeviceFingerprint, registry: Registry, refusal: str) -> Choice:
    default = Candidate(eligible(request, device, registry).default)
    if refusal:
        return Choice(default, why=refusal)
    try:
        obtained = obtain_plan(request, device, registry, Store(request.config.cache_dir))
        table = obtained.plan.table()
    except Exception as error:  # the engine starts, whatever went wrong in measuring
        why = str(error) if isinstance(error, DispatchError) else one_line(error)
        _log.warning("%s: the default %s serves every step: %s", request.spec.describe(), default, why)
        return Choice(default, why=why)
    _log.info("%s: plan %s", request.spec.describe(), obtained.source)
    return Choice(default, obtained.plan, table)
