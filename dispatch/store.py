"""The store: plans by their key in a folder, beside the samples that they were decided from."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import platformdirs
from filelock import FileLock

from dispatch.errors import PlanFileError, SamplesError
from dispatch.key import differences, digest
from dispatch.plan import StoredPlan
from dispatch.planfile import read_plans, write_plans
from dispatch.samples import Samples
from dispatch.samplesfile import read_samples, samples_path, write_samples

_log = logging.getLogger(__name__)


class Store:
    """A folder of plans. What cannot be read is a miss, with one warning; it is set aside and never deleted."""

    def __init__(self, folder: str | Path | None = None) -> None:
        """`folder`: None is the platform's cache folder."""
        self.folder = Path(folder or platformdirs.user_cache_dir("decode-dispatch")) / "plans"

    def path(self, key: dict[str, object]) -> Path:
        """Where the plan of a key lies."""
        return self.folder / f"{digest(key)[:32]}.json"

    def load(self, key: dict[str, object]) -> StoredPlan | None:
        """The stored plan of exactly this key, or None."""
        path = self.path(key)
        if not os.path.exists(path):  # unlike Path.exists, False where the folder cannot be read
            return None
        try:
            plan = read_plans(path)[0]
            differing = differences(plan.key, key)
            if not differing:
                return plan
            problem = f"{path}: {differing[0]}"
        except (PlanFileError, IndexError) as error:
            problem = str(error) or f"{path}: no plan in it"
        _log.warning("stored plan set aside: %s", problem)
        _set_aside(path)
        return None

    def load_samples(self, key: dict[str, object]) -> Samples | None:
        """The samples of the stored plan of this key, or None."""
        path = samples_path(self.path(key))
        if not os.path.exists(path):
            return None
        try:
            return read_samples(path)[0]
        except (SamplesError, IndexError) as error:
            _log.warning("stored samples set aside: %s", error)
            _set_aside(path)
            return None

    def save(self, plan: StoredPlan, samples: Samples | None) -> Path:
        """Store a plan; the samples first, so that a plan that is there has its own or none. Raises OSError."""
        path = self.path(dict(plan.key))
        self.folder.mkdir(parents=True, exist_ok=True)
        if samples is None:
            samples_path(path).unlink(missing_ok=True)
        else:
            write_samples(samples_path(path), [samples])
        write_plans(path, [plan])
        return path

    def lock(self, key: dict[str, object]) -> FileLock:
        """Held by the one process that tunes for this key. Raises OSError where the folder cannot be made."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return FileLock(self.path(key).with_suffix(".lock"))

    def newest(self) -> Path | None:
        """The plan file written last."""
        files = [p for p in self.folder.glob("*.json") if not p.name.startswith(".")]
        return max(files, key=lambda p: p.stat().st_mtime, default=None)


def _set_aside(path: Path) -> None:
    try:
        path.replace(path.with_name(f"{path.name}.bad-{time.time_ns()}"))
    except OSError as error:
        _log.warning("%s: cannot be set aside: %s", path, error.strerror)
