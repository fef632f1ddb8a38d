"""From a request to a plan: the stored one where there is one, otherwise tune and store it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from filelock import Timeout

from dispatch.backends import Registry
from dispatch.bench.phases import Phases
from dispatch.device import DeviceFingerprint
from dispatch.eligible import eligible
from dispatch.errors import MeasureError, PlanFileError
from dispatch.isolation.quarantine import Quarantine
from dispatch.key import differences
from dispatch.plan import StoredPlan
from dispatch.planfile import read_plans
from dispatch.request import TuneRequest
from dispatch.samples import Box, Samples
from dispatch.samplesfile import read_beside
from dispatch.store import Store
from dispatch.tuner import Progress, silent, tune

_log = logging.getLogger(__name__)

SLACK_S = 60.0  # beyond its time budget, how long another process that tunes may take to build, decide and write
SHOWN_DIFFERENCES = 5


@dataclass(frozen=True, slots=True)
class Obtained:
    """A plan, its samples where they are at hand, and how it was come by, for a person to read."""

    plan: StoredPlan
    samples: Samples | None
    path: Path | None
    source: str


def obtain_plan(
    request: TuneRequest,
    device: DeviceFingerprint,
    registry: Registry,
    store: Store,
    progress: Progress = silent,
    force: bool = False,
    phases: Phases | None = None,
    retry_quarantined: bool = False,
    left_s: float | None = None,
) -> Obtained:
    """The stored plan, or a new one. `force`: measure again, with the stored choices as incumbents. `phases`: told
    where the time goes. `retry_quarantined`: give candidates that failed in a child process another chance, and measure
    again where there are any. `left_s`: of the time budget, where other layer groups have had some of it.

    Where another process tunes for the same key, wait for it and use what it stored, partial as it may be: engines that
    start together are not to wait for one time budget after the other. Where nothing can be measured now, a stored plan
    serves, partial too. Raises ConfigError and, without a stored plan, MeasureError as `tune` does, and MeasureError
    when the other process does not end in time.
    """
    key = request.key(device, registry, eligible(request, device, registry).default)
    left_s = request.config.time_budget_s if left_s is None else left_s
    if retry_quarantined and Quarantine(store.path(key), key).clear():
        force = True
    if not force and (found := _read(store, key)):
        return found
    before = store.load(key)
    with ExitStack() as held:
        try:
            held.enter_context(store.lock(key).acquire(timeout=left_s + SLACK_S))
        except Timeout:
            busy = MeasureError("another process has been tuning for too long; the default stays")
            return _as_it_is(store, key, None if force else store.load(key), busy)
        except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
            _log.warning("the plan cannot be stored: %s: %s", store.folder, error)
        stored = store.load(key)
        if not force and stored is not None and stored != before:
            return Obtained(stored, None, store.path(key), "measured by another process meanwhile")
        earlier = store.load_samples(key) if stored is not None else None
        incumbent: Sequence[Box] = () if earlier is None else earlier.incumbent
        if force and stored is not None:
            incumbent = [decided.box for decided in stored.boxes]
        try:
            quarantine = Quarantine(store.path(key), key)
            _log.info("measuring decode attention, %s: at most %.0f s", request.spec.describe(), left_s)
            plan, samples = tune(
                request,
                device,
                registry,
                progress,
                earlier,
                incumbent,
                force,
                phases,
                quarantine,
                left_s=left_s,
            )
        except MeasureError as error:
            return _as_it_is(store, key, stored, error)
        path = _save(store, plan, samples)
    return Obtained(plan, samples, path, f"measured in {plan.seconds:.1f} s")


def plan_from_file(
    path: Path, request: TuneRequest, device: DeviceFingerprint, registry: Registry, store: Store
) -> Obtained:
    """The plan of this layer group out of a plan file, put into the store.

    Raises PlanFileError, naming the fields, if it was made for something else.
    """
    key = request.key(device, registry, eligible(request, device, registry).default)
    plans = read_plans(path)
    if not plans:
        raise PlanFileError(f"{path}: no plan in it")
    plan = min(plans, key=lambda p: len(differences(p.key, key)))
    differing = differences(plan.key, key)
    if differing:
        raise PlanFileError(mismatch(path, differing))
    (samples,) = read_beside(path, [plan.key])
    return Obtained(plan, samples, _save(store, plan, samples), f"taken from {path}")


def _read(store: Store, key: dict[str, Any]) -> Obtained | None:
    start = perf_counter()
    plan = store.load(key)
    if plan is None or plan.is_partial:
        return None
    milliseconds = (perf_counter() - start) * 1e3
    return Obtained(plan, None, store.path(key), f"read from the store in {milliseconds:.1f} ms")


def _as_it_is(store: Store, key: dict[str, Any], stored: StoredPlan | None, error: MeasureError) -> Obtained:
    """A stored plan, partial as it may be, where nothing can be measured now. Raises the error where there is none."""
    if stored is None:
        raise error
    _log.warning("the stored plan is used as it is: %s", error)
    return Obtained(stored, store.load_samples(key), store.path(key), f"read from the store; not measured: {error}")


def _save(store: Store, plan: StoredPlan, samples: Samples | None) -> Path | None:
    """Store what can be stored; a store that cannot be written costs the next start its time, and nothing else."""
    try:
        return store.save(plan, samples)
    except OSError as error:
        _log.warning("the plan was not stored: %s: %s", store.folder, error.strerror)
        return None


def mismatch(path: Path, differing: Sequence[str]) -> str:
    """The line that refuses a plan file: what differs, or the first few of it."""
    shown = "; ".join(differing[:SHOWN_DIFFERENCES])
    more = len(differing) - SHOWN_DIFFERENCES
    return f"{path} does not fit here: {shown}" + (f"; and {more} more" if more > 0 else "")
