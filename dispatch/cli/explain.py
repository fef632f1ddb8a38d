"""`explain`: why this backend for this batch."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.table import Table

    from dispatch.plan import DecidedBox, StoredPlan
    from dispatch.regimes import Regime
    from dispatch.samples import BucketSamples, Samples


@click.command()
@click.argument("plan", required=False, type=click.Path(path_type=Path))
@click.option("--batch-size", "-b", required=True, type=click.IntRange(min=1), help="Requests in the batch.")
@click.option("--kv", required=True, type=click.IntRange(min=1), help="Mean KV length in tokens.")
@click.option("--max-kv", type=click.IntRange(min=1), help="Longest KV length in tokens. [default: the mean]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for a program.")
def explain(plan: Path | None, batch_size: int, kv: int, max_kv: int | None, as_json: bool) -> None:
    """Say what PLAN (or the plan stored last) serves a batch with, which rule decided, and what the others lost by."""
    from dispatch.cli.files import find_plans
    from dispatch.cli.render import console

    max_kv = kv if max_kv is None else max_kv
    if max_kv < kv:
        raise click.BadParameter(f"{max_kv} is below the mean {kv}", param_hint="--max-kv")
    path, found = find_plans(plan)
    answers = [_answer(stored, samples, batch_size, kv, max_kv) for stored, samples in found]
    if as_json:
        click.echo(json.dumps({"path": str(path), "answers": [a["data"] for a in answers]}, indent=1))
        return
    out = console()
    for answer in answers:
        for part in answer["shown"]:
            out.print(part, highlight=False, soft_wrap=isinstance(part, str))


def _answer(stored: StoredPlan, samples: Samples | None, batch_size: int, kv: int, max_kv: int) -> dict[str, Any]:
    """The same answer twice: `data` for a program, `shown` for a terminal."""
    from dispatch.cli.render import left_out
    from dispatch.isolation.quarantine import QUARANTINED
    from dispatch.samples import EVEN, skew_of

    what = f"{stored.spec.describe()}\nbatch {batch_size}, mean KV {kv}, max KV {max_kv}"
    entry = stored.table().lookup(batch_size, kv, skew_of(kv, max_kv))
    if entry is None:
        why = _why_missed(stored, batch_size)
        line = f"{what}: no entry, so the default {stored.default}: {why}"
        return {"data": {"candidate": stored.default, "hit": False, "why": why}, "shown": [line]}
    decided = next(d for d in stored.boxes if d.box.bucket == entry.bucket and d.box.holds(kv, max_kv))
    box = decided.box
    lines: list[Any] = [
        f"{what}: [bold]{_escaped(box.candidate)}[/]",
        f"bucket {box.bucket}, box of mean KV {box.mean_kv_min} to {box.mean_kv_max}"
        f" and longest over mean {box.skew_min / EVEN:g} to {box.skew_max / EVEN:g}",
        f"rule: {_rule(decided, stored.default)}",
    ]
    data: dict[str, Any] = {"candidate": box.candidate, "hit": True, **asdict(box)}
    data |= {"reason": decided.reason.name, "speedup": decided.speedup}
    quarantined = {name: why for name, why in stored.refused.items() if why.startswith(QUARANTINED)}
    data |= {"quarantined": quarantined} if quarantined else {}
    regime, bucket = _evidence(samples, box.bucket, kv, max_kv)
    if samples is None or regime is None or bucket is None:
        lines.append("without its samples beside the plan, what the others lost by cannot be told")
        lines += left_out(replace(stored, excluded=tuple(e for e in stored.excluded if e.bucket == box.bucket)))
        return {"data": data, "shown": lines}
    decision = regime.decision
    lines.append(
        f"a winner's time must be {_percent(-decision.delta)[1:]} less (the default against itself: up to"
        f" {_percent(decision.aa_spread)});"
        f" {len(regime.cells)} cells decided"
    )
    lines += [_verdicts(regime, bucket, samples.default), _medians(regime, bucket, samples.num_layers)]
    lines += left_out(replace(stored, excluded=()))  # why a candidate is out, the verdicts say
    data["decision"] = {
        "delta": decision.delta,
        "aa_spread": decision.aa_spread,
        "cells": [asdict(bucket.cells[i]) for i in regime.cells],
        "verdicts": [asdict(v) | {"reason": v.reason.name} for v in decision.verdicts],
    }
    return {"data": data, "shown": lines}


def _rule(decided: DecidedBox, default: str) -> str:
    if decided.box.candidate == default:
        return f"the default, because no other is better ({decided.reason.value})"
    return f"{decided.reason.value}; {decided.speedup:.3f}x over the default {_escaped(default)}"


def _why_missed(stored: StoredPlan, batch_size: int) -> str:
    bucket = next((b for b in stored.buckets if b >= batch_size), None)
    if bucket is None:
        return f"batch {batch_size} is above the largest bucket {stored.buckets[-1]}"
    if bucket in stored.unmeasured:
        return f"bucket {bucket}: {stored.unmeasured[bucket]}"
    return f"bucket {bucket}: these lengths lie outside what was measured"


def _evidence(samples: Samples | None, bucket: int, kv: int, max_kv: int) -> tuple[Regime | None, BucketSamples | None]:
    """The decided box, and the samples that its cells are of."""
    from dispatch.regimes import decide
    from dispatch.subcells import Subcells

    if samples is None:
        return None, None
    regimes = decide(samples).get(bucket, ())
    regime = next((r for r in regimes if r.box.holds(kv, max_kv)), None)
    return regime, next((Subcells.of(b).split(b) for b in samples.buckets if b.bucket == bucket), None)


def _verdicts(regime: Regime, bucket: BucketSamples, default: str) -> Table:
    from rich.table import Table

    table = Table(title=f"against {_escaped(default)}, paired by round", title_justify="left")
    for title in ("candidate", "time, mean", "time, worst cell", "rounds won", "verdict"):
        table.add_column(title, justify="right" if "time" in title or "won" in title else "left")
    for v in regime.decision.verdicts:
        worst = ""
        if v.worst_r is not None and v.worst_cell is not None:
            cell = bucket.cells[v.worst_cell]
            worst = f"{_percent(v.worst_r, sign=True)} at {cell.mean_kv}, {cell.profile}"
        table.add_row(
            _escaped(v.candidate),
            "" if v.mean_r is None else _percent(v.mean_r, sign=True),
            worst,
            "" if v.win_share is None else f"{100 * v.win_share:.0f}%",
            _escaped(v.reason.value + (f" ({v.detail})" if v.detail else "")),
        )
    return table


def _medians(regime: Regime, bucket: BucketSamples, num_layers: int) -> Table:
    import numpy as np
    from rich.table import Table

    from dispatch.evidence import median_of_rounds

    table = Table(title=f"microseconds a step of {num_layers} layers, median of the rounds", title_justify="left")
    for title in ("mean KV", "max KV", "profile"):
        table.add_column(title, justify="left" if title == "profile" else "right")
    for name in bucket.candidates:
        table.add_column(_escaped(name), justify="right")
    step = median_of_rounds(bucket.step_us(num_layers))
    for i in regime.cells:
        cell = bucket.cells[i]
        times = ("-" if np.isnan(t) else f"{t:.0f}" for t in step[:, i])
        table.add_row(str(cell.mean_kv), str(cell.max_kv), cell.profile, *times)
    return table


def _percent(log_ratio: float, sign: bool = False) -> str:
    """A log ratio of times as a difference in time."""
    return f"{100 * math.expm1(log_ratio):{'+' if sign else ''}.1f}%"


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)
