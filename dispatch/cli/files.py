"""Finding the plan that a command is about."""

from __future__ import annotations

from pathlib import Path

from dispatch.config import DispatchConfig
from dispatch.errors import PlanFileError
from dispatch.plan import StoredPlan
from dispatch.planfile import read_plans
from dispatch.samples import Samples
from dispatch.samplesfile import read_beside
from dispatch.store import Store

Found = tuple[StoredPlan, Samples | None]


def find_plans(path: Path | None) -> tuple[Path, list[Found]]:
    """The plans of a file, or of the one stored last, each with its samples where they lie beside it.

    Raises PlanFileError.
    """
    if path is None:
        store = Store(DispatchConfig.from_env().cache_dir)
        path = store.newest()
        if path is None:
            raise PlanFileError(f"no stored plan in {store.folder}: run `tune` first, or name a plan file")
    plans = read_plans(path)
    return path, list(zip(plans, read_beside(path, [plan.key for plan in plans]), strict=True))
