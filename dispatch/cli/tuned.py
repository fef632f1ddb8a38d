"""What `tune` prints and writes."""

from __future__ import annotations

import json
from pathlib import Path

import click

from dispatch.cli.render import console, plan_view
from dispatch.cli.write import write_file
from dispatch.obtain import Obtained
from dispatch.plan import TIME_BUDGET_OVER
from dispatch.planfile import plan_to_json, write_plans
from dispatch.request import TuneRequest
from dispatch.samplesfile import samples_path, write_samples


def write_out(out: Path, obtained: list[Obtained]) -> str:
    """Returns the line that says what was written. Raises DispatchError."""
    write_file(out, lambda path: write_plans(path, [o.plan for o in obtained]))
    runs = [o.samples for o in obtained if o.samples is not None]
    if runs:
        write_file(samples_path(out), lambda path: write_samples(path, runs))
    return f"plan written to {out}" + (f", samples to {samples_path(out)}" if runs else "")


def print_json(obtained: list[Obtained]) -> None:
    plans = [{"source": o.source, "path": str(o.path) if o.path else None, **plan_to_json(o.plan)} for o in obtained]
    click.echo(json.dumps({"plans": plans}, indent=1))


def print_tables(title: str, request: TuneRequest, limit: str, obtained: list[Obtained]) -> None:
    terminal = console()
    terminal.print(title, highlight=False)
    terminal.print(
        f"batch up to {request.buckets[-1]}, KV up to {request.max_seq_len} tokens a request,"
        f" {request.capacity} in all ({limit})",
        highlight=False,
    )
    for one in obtained:
        terminal.print()
        terminal.print(plan_view(one.plan, one.samples))
        if TIME_BUDGET_OVER in one.plan.unmeasured.values():
            click.echo(
                "the time budget ended first: run the same command again to measure the rest,"
                " with a larger DYN_DECODE_TIME_BUDGET where not one bucket was measured"
            )
        click.echo(f"plan {one.source}" + (f"; it is in {one.path}" if one.path else ""))
