"""`bench stability`: whether tuning again decides the same."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click

from dispatch.cli.tune import tune

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from dispatch.bench.stability import Stability
    from dispatch.bench.stability_run import Stable

OURS = {"out": "--out", "plan_file": "--plan", "force": "--force"}  # what the runs are given or must not have
SHOWN_FLIPS = 20


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--runs", default=10, show_default=True, type=click.IntRange(min=2), help="Processes that tune.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for a program, with every flip.")
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="--model NAME [OPTIONS OF tune]")
def stability(runs: int, as_json: bool, options: tuple[str, ...]) -> None:
    """Tune again and again, each time in a process of its own, and say which choices differ and what that costs.

    First with nothing stored; then once more, each run challenging the choices that the one before it has stored.
    Ends with status 1 if the plan of a bucket costs more than the threshold over that of most runs, on average over
    the bucket, or if a stored choice differs at all.
    """
    from dispatch.bench.stability_run import run_stability
    from dispatch.cli.render import console

    given = tune.make_context("tune", list(options)).params  # a mistake is told before anything runs
    for name in OURS:
        if given[name]:
            raise click.UsageError(f"{OURS[name]}: not with bench stability")
    with TemporaryDirectory() as folder:
        found = run_stability(options, runs, Path(folder), lambda what: click.echo(what, err=True))
    if as_json:
        groups = [
            {"fresh": fresh.to_json(), "stored": stored.to_json()}
            for fresh, stored in zip(found.fresh, found.stored, strict=True)
        ]
        click.echo(json.dumps({"ok": found.ok, "groups": groups}, indent=1))
    else:
        console().print(_view(found))
    if not found.ok:
        raise SystemExit(1)


def _view(found: Stable) -> RenderableType:
    """A row for each kind of runs, and the dearest flips."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    caption = "differ: are served otherwise than in most runs; cost: time over what most runs choose"
    table = Table(caption=caption + "; a bucket's: on average over its batches")
    table.add_column("runs")
    for heading in ("buckets", "differ", "dearest", "cells", "differ", "dearest", "median cost"):
        table.add_column(heading, justify="right")
    flips: list[str] = []
    for what, groups in (("nothing stored", found.fresh), ("with the store", found.stored)):
        for one in groups:
            known = [flip.cost for flip in one.flips if flip.cost is not None]
            table.add_row(
                f"{one.runs}, {what}",
                str(one.buckets),
                f"{one.share_of_buckets:.1%}",
                _percent(one.dearest),
                str(one.cells),
                f"{one.share_of_cells:.2%}",
                _percent(max(known, default=None)),
                _percent(sorted(known)[len(known) // 2] if known else None),
            )
            flips += [f"{what}: {line}" for line in _dearest(one)]
    return Group(table, *(Text(line) for line in flips[:SHOWN_FLIPS]))


def _dearest(found: Stability) -> Sequence[str]:
    ordered = sorted(found.flips, key=lambda flip: -float("inf") if flip.cost is None else -flip.cost)
    return [
        f"run {flip.run + 1}, batch {flip.bucket}, {flip.cell.profile}, mean KV {flip.cell.mean_kv}, longest"
        f" {flip.cell.max_kv}: {flip.choice}, most runs {flip.majority}, {_percent(flip.cost)}"
        for flip in ordered
    ]


def _percent(cost: float | None) -> str:
    from math import expm1, isinf

    return "-" if cost is None or isinf(cost) else f"{expm1(cost):+.1%}"
