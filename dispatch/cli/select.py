"""`select`: decide again from a samples file, on any machine."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command()
@click.argument("samples", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Write the plan to this file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for a program.")
def select(samples: Path, out: Path | None, as_json: bool) -> None:
    """Decide from SAMPLES, as `tune` did when it measured them. Needs neither a GPU nor the kernel libraries."""
    from dispatch.cli.render import console, plan_view
    from dispatch.cli.write import write_file
    from dispatch.conclude import conclude
    from dispatch.planfile import plan_to_json, write_plans
    from dispatch.samplesfile import read_samples

    runs = read_samples(samples)
    plans = [conclude(run, {}) for run in runs]
    if out is not None:
        write_file(out, lambda path: write_plans(path, plans))
    if as_json:
        click.echo(json.dumps({"plans": [plan_to_json(plan) for plan in plans]}, indent=1))
        return
    for plan, run in zip(plans, runs, strict=True):
        console().print(plan_view(plan, run))
