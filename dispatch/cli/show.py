"""`show`: print a plan."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command()
@click.argument("plan", required=False, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON for a program.")
def show(plan: Path | None, as_json: bool) -> None:
    """Print PLAN, a plan file; without it, the plan that was stored last."""
    from dispatch.cli.files import find_plans
    from dispatch.cli.render import console, plan_view
    from dispatch.planfile import plan_to_json

    path, found = find_plans(plan)
    if as_json:
        click.echo(json.dumps({"path": str(path), "plans": [plan_to_json(p) for p, _ in found]}, indent=1))
        return
    for stored, samples in found:
        console().print(plan_view(stored, samples))
    click.echo(f"{path}, made {found[0][0].created}" if found else f"{path}: no plan in it")
