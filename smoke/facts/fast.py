"""How long a table of 20 buckets, 8 KV points, 4 profiles and 5 or 6 candidates takes, and what it would decide after
four times the rounds.

    python -m smoke.facts.fast --out FOLDER

Tunes qwen3-8b's layer on the GPU, in this process, with 15 rounds and with 60, and once more with 15 of other lengths,
and writes FOLDER/fast.json. Kernels have to be compiled before. The first two plans are compared on the batches of each
run, by its times. They had chosen by their own; neither had seen the third's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import dispatch.bench.profiles
import dispatch.tuner
from dispatch.backends import registry
from dispatch.bench.phases import Phases
from dispatch.bench.profiles import SEED, SIGMAS, Profile
from dispatch.bench.rounds import ROUNDS
from dispatch.candidate import Candidate
from dispatch.config import DispatchConfig
from dispatch.device import current_device
from dispatch.grid import capture_buckets
from dispatch.models import load_model
from dispatch.plan import StoredPlan
from dispatch.request import TuneRequest
from dispatch.samples import BucketSamples, Samples, log_of_times, skews_of

MODEL, PAGE_SIZE, CAPACITY, MAX_SEQ_LEN, MAX_BATCH = "qwen3-8b", 16, 800_000, 65536, 320
MORE = 4  # times the rounds


class FourProfiles(TuneRequest):
    """Without one-long."""

    @property
    def profiles(self) -> tuple[Profile, ...]:
        return super().profiles[: len(SIGMAS)]


def tuned(rounds: int, seed: int = SEED) -> tuple[StoredPlan, Samples, Phases]:
    """The table, with so many rounds a cell, of lengths that are drawn with this seed."""
    dispatch.tuner.ROUNDS, dispatch.bench.profiles.SEED = rounds, seed
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


def chosen(plan: StoredPlan, its: BucketSamples) -> list[str]:
    """What serves each batch of a bucket, in the order of cells and rounds."""
    table, own = plan.table(), its.longest > 0
    batches = zip(its.means[own].tolist(), skews_of(its)[own].tolist(), strict=True)
    entries = [table.lookup(its.bucket, mean_kv, skew) for mean_kv, skew in batches]
    return [str(Candidate(entry.backend, entry.tactic)) if entry else plan.default for entry in entries]


def compared(quick: StoredPlan, slow: StoredPlan, samples: Samples) -> list[dict[str, Any]]:
    """Of each bucket: how many batches of `samples` there are and how many the plans serve otherwise; of those whose
    choices are both timed, what the quick plan's costs there; and of all batches that both plans serve with what is
    timed, how many there are, and the gains over the default. `samples` lack a candidate's time where it had lost.
    Ratios of geometric means.
    """
    rows = []
    for its in samples.buckets:
        log = log_of_times(its.step_us(samples.num_layers))
        cells, rounds = np.nonzero(its.longest)
        names = [chosen(plan, its) for plan in (quick, slow)]
        taken = [log[[its.candidates.index(name) for name in each], cells, rounds] for each in names]
        default = log[0, cells, rounds]
        differs = np.array(names[0]) != np.array(names[1])
        timed = np.isfinite(taken[0]) & np.isfinite(taken[1]) & np.isfinite(default)
        costs = (taken[0] - taken[1])[timed & differs]
        gains = [float(np.exp((default - each)[timed].mean())) for each in taken]
        row = {"bucket": its.bucket, "batches": len(differs), "differ": int(differs.sum()), "costs": len(costs)}
        cost = float(np.expm1(costs.mean())) if len(costs) else 0.0
        row |= {"cost": cost, "timed": int(timed.sum()), "quick_over_default": gains[0], "over_default": gains[1]}
        rows.append(row)
    return rows


def in_all(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The share of batches that differ, what the quick plan costs in these and over all batches, and both gains."""

    def mean(ratios: str, weights: str, plus: float = 0.0) -> float:
        total = sum(row[weights] * np.log(plus + row[ratios]) for row in rows)
        return float(np.exp(total / max(1, sum(row[weights] for row in rows))))

    quick, slow = mean("quick_over_default", "timed"), mean("over_default", "timed")
    return {
        "differ": sum(row["differ"] for row in rows) / sum(row["batches"] for row in rows),
        "cost": mean("cost", "costs", 1.0) - 1,
        "cost_over_all": slow / quick - 1,
        "quick_over_default": quick,
        "over_default": slow,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m smoke.facts.fast", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    folder = parser.parse_args(arguments).out
    runs = {"quick": tuned(ROUNDS), "slow": tuned(MORE * ROUNDS), "judge": tuned(ROUNDS, SEED + 1)}
    quick, slow = (runs[name][0] for name in ("quick", "slow"))
    rows = {name: compared(quick, slow, samples) for name, (_, samples, _) in runs.items()}
    found: dict[str, Any] = {name: seconds(plan, phases) for name, (plan, _, phases) in runs.items()}
    found |= {"rows": rows, "in_all": {name: in_all(its) for name, its in rows.items()}}
    found["candidates"] = {its.bucket: list(its.candidates) for its in runs["quick"][1].buckets}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "fast.json").write_text(json.dumps(found, indent=1) + "\n")
    for name in runs:
        its = found[name]
        print(f"{name}: {its['all']:.1f} s, child {its['child']:.1f}, here {its['measured and gated here']:.1f}")
    for name, its in found["in_all"].items():
        gains = f"{its['quick_over_default']:.4f}x and {its['over_default']:.4f}x over the default"
        costs = f"at {its['cost']:+.2%}, over all {its['cost_over_all']:+.2%}"
        print(f"by the {name} run's times: {its['differ']:.1%} of batches differ, {costs}; {gains}")


if __name__ == "__main__":
    main()
