"""The store: plans by their key in a folder, beside the samples that they were decided from."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import platformdirs
from filelock import FileLock

from dispatch.atomic import check_writable, opened, set_aside
from dispatch.errors import PlanFileError, SamplesError
from dispatch.key import differences, digest
from dispatch.plan import StoredPlan
from dispatch.planfile import read_plans, write_plans
from dispatch.samples import Samples
from dispatch.samplesfile import read_samples, samples_path, write_samples

T = TypeVar("T", StoredPlan, Samples)


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
        return _load(self.path(key), read_plans, key)

    def load_samples(self, key: dict[str, object]) -> Samples | None:
        """The samples of the stored plan of this key, or None."""
        return _load(samples_path(self.path(key)), read_samples, key)

    def save(self, plan: StoredPlan, samples: Samples | None) -> Path:
        """Store a plan; the samples first, so that a plan that is there has its own or newer ones. Raises OSError."""
        path = self.path(dict(plan.key))
        self.folder.mkdir(parents=True, exist_ok=True)
        if samples is None:
            samples_path(path).unlink(missing_ok=True)
        else:
            write_samples(samples_path(path), [samples])
        write_plans(path, [plan])
        return path

    def problem(self) -> str:
        """Why no plan can be stored, or "". Makes the folder, as storing does."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            check_writable(self.folder / "plan.json")
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def lock(self, key: dict[str, object]) -> FileLock:
        """Held by the one process that tunes for this key. Raises OSError where the folder cannot be made."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return FileLock(self.path(key).with_suffix(".lock"))

    def newest(self) -> Path | None:
        """The plan file written last."""
        files = [p for p in self.folder.glob("*.json") if not p.name.startswith(".")]
        return max(files, key=_written_s, default=None)


def _written_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # another process has just set it aside
        return 0.0


def _load(path: Path, read: Callable[[Path], tuple[T, ...]], key: dict[str, object]) -> T | None:
    """What the file holds if it is of this key. Otherwise the file is set aside, with one warning."""
    if not os.path.exists(path):  # unlike Path.exists, False where the folder cannot be read
        return None
    seen = opened(path)
    if seen is None:
        return None
    try:
        held = read(path)
        differing = differences(held[0].key, key) if held else ["nothing is in it"]
        if not differing:
            return held[0]
        set_aside(path, seen, f"{path}: {differing[0]}")
    except (PlanFileError, SamplesError) as error:
        set_aside(path, seen, str(error))
    finally:
        os.close(seen)
    return None
