"""`explain`: why this backend for this batch."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from dispatch.plan import DecidedBox, StoredPlan
    from dispatch.regimes import Regime
    from dispatch.samples import Box, BucketSamples, Samples


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
    from rich.markup import escape

    from dispatch.cli.explain_view import percent, times, verdicts
    from dispatch.cli.render import left_out
    from dispatch.isolation.quarantine import QUARANTINED
    from dispatch.samples import skew_of

    what = f"{stored.spec.describe()}\nbatch {batch_size}, mean KV {kv}, max KV {max_kv}"
    entry = stored.table().lookup(batch_size, kv, skew_of(kv, max_kv))
    if entry is None:
        why = _why_missed(stored, batch_size)
        line = f"{what}: no entry, so the default {stored.default}: {why}"
        return {"data": {"candidate": stored.default, "hit": False, "why": why}, "shown": [line]}
    decided = next(d for d in stored.boxes if d.box.bucket == entry.bucket and d.box.holds(kv, max_kv))
    box = decided.box
    lines: list[Any] = [
        f"{what}: [bold]{escape(box.candidate)}[/]",
        f"bucket {box.bucket}, box of {_bounds(box)}",
        f"rule: {_rule(decided, stored.default)}",
    ]
    data: dict[str, Any] = {"candidate": box.candidate, "hit": True, **asdict(box)}
    data |= {"reason": decided.reason.name, "speedup": decided.speedup}
    quarantined = {name: why for name, why in stored.refused.items() if why.startswith(QUARANTINED)}
    data |= {"quarantined": quarantined} if quarantined else {}
    excluded = tuple(e for e in stored.excluded if e.bucket == box.bucket)
    regime, bucket = _evidence(samples, box.bucket, kv, max_kv)
    if samples is None or bucket is None:
        lines.append("without its samples beside the plan, what the others lost by cannot be told")
        return {"data": data, "shown": [*lines, *left_out(replace(stored, excluded=excluded))]}
    cells = range(len(bucket.cells)) if regime is None else regime.cells
    as_stored = regime is not None and (regime.box, regime.decision.reason) == (box, decided.reason)
    if not as_stored:
        lines.append(_decided_again(stored, regime))
        data["decided_again"] = None if regime is None else asdict(regime.box)
    if regime is not None and regime.box.candidate == box.candidate:
        decision = regime.decision
        lines.append(
            f"a winner's time must be {percent(-decision.delta)[1:]} less (the default against itself: up to"
            f" {percent(decision.aa_spread)});"
            f" {len(regime.cells)} cells decided"
        )
        lines.append(verdicts(decision, bucket, samples.default))
        excluded = ()  # the verdicts say why a candidate is out
        data["decision"] = {
            "delta": decision.delta,
            "aa_spread": decision.aa_spread,
            "cells": [asdict(bucket.cells[i]) for i in cells],
            "verdicts": [asdict(v) | {"reason": v.reason.name} for v in decision.verdicts],
        }
    lines.append(times(bucket, cells, samples.num_layers, kv, max_kv))
    return {"data": data, "shown": [*lines, *left_out(replace(stored, excluded=excluded))]}


def _bounds(box: Box) -> str:
    from dispatch.samples import EVEN

    skews = f"{box.skew_min / EVEN:g} to {box.skew_max / EVEN:g}"
    return f"mean KV {box.mean_kv_min} to {box.mean_kv_max} and longest over mean {skews}"


def _rule(decided: DecidedBox, default: str) -> str:
    from rich.markup import escape

    if decided.box.candidate == default:
        return f"the default, because no other is better ({decided.reason.value})"
    gain = f"{decided.speedup:.3f}x over the default {escape(default)} where one half of the rounds chose for the other"
    return f"{decided.reason.value}; {gain}"


def _decided_again(stored: StoredPlan, regime: Regime | None) -> str:
    """The line that says what today's rule makes of the samples, where that is not what the plan has."""
    from rich.markup import escape

    from dispatch.key import RULE_VERSION
    from dispatch.plainjson import shown

    found = "no box here"
    if regime is not None:
        name, is_default = escape(regime.box.candidate), regime.box.candidate == stored.default
        chosen = f"the default {name}" if is_default else f"{name} ({regime.decision.reason.value})"
        found = f"{chosen} in the box of {_bounds(regime.box)}"
    version = stored.key.get("rule_version")
    whose = "" if version == RULE_VERSION else f"; its rule is version {escape(shown(version))}, ours {RULE_VERSION}"
    return f"the plan was decided otherwise: of the same samples this version makes {found}{whose}"


def _why_missed(stored: StoredPlan, batch_size: int) -> str:
    bucket = next((b for b in stored.buckets if b >= batch_size), None)
    if bucket is None:
        return f"batch {batch_size} is above the largest bucket {stored.buckets[-1]}"
    if bucket in stored.unmeasured:
        return f"bucket {bucket}: {stored.unmeasured[bucket]}"
    return f"bucket {bucket}: these lengths lie outside what was measured"


def _evidence(samples: Samples | None, bucket: int, kv: int, max_kv: int) -> tuple[Regime | None, BucketSamples | None]:
    """What is decided of this bucket's samples now for the batch, and those samples in the cells that it is of."""
    from dispatch.regimes import decide
    from dispatch.subcells import Subcells

    measured = () if samples is None else tuple(b for b in samples.buckets if b.bucket == bucket)
    if samples is None or not measured:
        return None, None
    regimes = decide(replace(samples, buckets=measured))[bucket]
    regime = next((r for r in regimes if r.box.holds(kv, max_kv)), None)
    return regime, Subcells.of(measured[0]).split(measured[0])
