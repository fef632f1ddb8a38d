"""How long a table of 20 buckets, 8 KV points, 4 profiles and 5 or 6 candidates takes, and what it would decide after
four times the rounds.

    python -m smoke.facts.fast --out FOLDER

Tunes qwen3-8b's layer twice on the GPU, in this process, with 15 rounds and with 60, and writes FOLDER/fast.json.
Kernels have to be compiled before. The plans are compared on the batches of the longer run, by its times.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import starmap
from pathlib import Path
from typing import Any

import numpy as np

import dispatch.tuner
from dispatch.backends import registry
from dispatch.bench.phases import Phases
from dispatch.bench.profiles import SIGMAS, LogNormal, Profile
from dispatch.bench.rounds import ROUNDS
from dispatch.candidate import Candidate
from dispatch.config import DispatchConfig
from dispatch.device import current_device
from dispatch.grid import capture_buckets
from dispatch.models import load_model
from dispatch.plan import StoredPlan
from dispatch.request import TuneRequest
from dispatch.samples import Samples, log_of_times, skew_of

MODEL, PAGE_SIZE, CAPACITY, MAX_SEQ_LEN, MAX_BATCH = "qwen3-8b", 16, 800_000, 65536, 320
MORE = 4  # times the rounds


class FourProfiles(TuneRequest):
    """Without one-long."""

    @property
    def profiles(self) -> tuple[Profile, ...]:
        return tuple(starmap(LogNormal, SIGMAS.items()))


def tuned(rounds: int) -> tuple[StoredPlan, Samples, Phases]:
    """The table, with so many rounds a cell."""
    dispatch.tuner.ROUNDS = rounds
    config = DispatchConfig(exclude=("flashinfer_fa2",), time_budget_s=900)
    (spec,) = load_model(MODEL).layer_groups(1, PAGE_SIZE, None)
    request = FourProfiles(spec, capture_buckets(MAX_BATCH), MAX_SEQ_LEN, CAPACITY, config)
    phases = Phases()
    return *dispatch.tuner.tune(request, current_device(), registry, phases=phases), phases


def seconds(plan: StoredPlan, phases: Phases) -> dict[str, Any]:
    """In all, and of that in the child process, and in this one until the last sample."""
    child = sum(s for name, s in phases.seconds.items() if name.startswith("in a child"))
    here = sum(phases.seconds.values()) - child
    return {"all": plan.seconds, "child": child, "measured and gated here": here, "phases": phases.seconds}


def chosen(plan: StoredPlan, bucket: int, mean_kv: int, longest: int) -> str:
    """What serves such a batch."""
    entry = plan.table().lookup(bucket, mean_kv, skew_of(mean_kv, longest))
    return str(Candidate(entry.backend, entry.tactic)) if entry else plan.default


def compared(quick: StoredPlan, slow: StoredPlan, samples: Samples) -> list[dict[str, Any]]:
    """Of each bucket: the share of the batches of `samples` that the plans serve otherwise, what the quick plan's
    choice costs there, and the gain of both plans over the default in all of them, as ratios of geometric means."""
    rows = []
    for its in samples.buckets:
        log = log_of_times(its.step_us(samples.num_layers))
        differs, costs, gains = 0, [], ([], [])
        for c, r in zip(*np.nonzero(its.longest), strict=True):
            names = [chosen(plan, its.bucket, int(its.means[c, r]), int(its.longest[c, r])) for plan in (quick, slow)]
            a, b = (log[its.candidates.index(name), c, r] for name in names)
            differs += names[0] != names[1]
            if names[0] != names[1] and np.isfinite(a - b):
                costs.append(a - b)
            for gain, time in zip(gains, (a, b), strict=True):
                if np.isfinite(log[0, c, r] - time):
                    gain.append(log[0, c, r] - time)
        share = differs / int((its.longest > 0).sum())
        over = [float(np.exp(np.mean(gain))) for gain in gains]
        cost = {"cost": float(np.expm1(np.mean(costs))) if costs else 0.0, "costs": len(costs)}
        over_default = {"quick_over_default": over[0], "over_default": over[1]}
        rows.append({"bucket": its.bucket, "differ": share, **cost, **over_default})
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m smoke.facts.fast", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    folder = parser.parse_args(arguments).out
    (quick, few, phases), (slow, many, slow_phases) = tuned(ROUNDS), tuned(MORE * ROUNDS)
    rows = compared(quick, slow, many)
    candidates = {its.bucket: list(its.candidates) for its in few.buckets}
    found = {"quick": seconds(quick, phases), "slow": seconds(slow, slow_phases), "rows": rows}
    found["candidates"] = candidates
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "fast.json").write_text(json.dumps(found, indent=1) + "\n")
    for name in ("quick", "slow"):
        its = found[name]
        print(f"{name}: {its['all']:.1f} s, child {its['child']:.1f}, here {its['measured and gated here']:.1f}")
    for row in rows:
        print(
            f"batch {row['bucket']}: {row['differ']:.1%} differ, {row['cost']:+.2%} there;"
            f" {row['quick_over_default']:.4f}x and {row['over_default']:.4f}x over the default"
        )


if __name__ == "__main__":
    main()
