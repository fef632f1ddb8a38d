"""Runs of `bench stability`: processes of their own that tune, one after the other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from dispatch.bench.stability import Run, Stability, stability
from dispatch.errors import MeasureError
from dispatch.planfile import read_plans
from dispatch.samplesfile import read_beside

Runs = list[tuple[Run, ...]]
"""Of each run, its layer groups."""


@dataclass(frozen=True)
class Stable:
    """Of each layer group: runs that knew nothing of one another, and runs that each challenged the stored choices."""

    fresh: tuple[Stability, ...]
    stored: tuple[Stability, ...]

    @property
    def ok(self) -> bool:
        """Whether no flip costs more than the threshold, and no stored choice flips."""
        return all(each.cheap for each in self.fresh) and not any(each.flips for each in self.stored)


def run_stability(options: Sequence[str], runs: int, folder: Path, progress: Callable[[str], None]) -> Stable:
    """Tune `runs` times with nothing stored, then with the first one's store, measuring again each time.

    `options`: of `tune`. `folder`: an empty one, for plans and stores. `progress` is told of each run. Raises
    MeasureError with the last line of what a run says that fails.
    """
    fresh: Runs = []
    for i in range(runs):
        progress(f"run {i + 1} of {runs}, nothing stored")
        fresh.append(_tune(options, folder / f"store-{i}", folder / f"fresh-{i}.json", progress))
    stored: Runs = fresh[:1]
    for i in range(1, runs):
        progress(f"run {i + 1} of {runs}, with the first one's store")
        stored.append(_tune([*options, "--force"], folder / "store-0", folder / f"stored-{i}.json", progress))
    return Stable(_by_group(fresh), _by_group(stored))


def _tune(options: Sequence[str], store: Path, out: Path, progress: Callable[[str], None]) -> tuple[Run, ...]:
    start = monotonic()
    command = [sys.executable, "-m", "dispatch", "tune", *options]
    command += ["--dyn_decode_cache_dir", str(store), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise MeasureError(f"a run of tune ended with status {done.returncode}: {last.removeprefix('Error: ')}")
    plans = read_plans(out)
    progress(f"  {monotonic() - start:.1f} s, {sum(plan.seconds for plan in plans):.1f} s of it to measure and decide")
    found = []
    for plan, samples in zip(plans, read_beside(out, [plan.key for plan in plans]), strict=True):
        if samples is None:
            raise MeasureError(f"a run of tune wrote no samples for {plan.spec.describe()}")
        found.append(Run(plan, samples))
    return tuple(found)


def _by_group(runs: Runs) -> tuple[Stability, ...]:
    return tuple(stability(of_group) for of_group in zip(*runs, strict=True))
