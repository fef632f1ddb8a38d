"""`bench`: what the parts cost on this machine, and whether what is timed can be relied on."""

from __future__ import annotations

import json

import click

from dispatch.cli.bench_faults import faults
from dispatch.cli.bench_stability import stability
from dispatch.cli.bench_step import step
from dispatch.cli.bench_truth import truth

IMPLEMENTATIONS = {"cpp": "BackendPlan, C++", "python": "BackendPlan, Python", "dict_bisect": "dict with bisect"}


@click.group()
def bench() -> None:
    """Measure the package itself: what it costs, and whether its timings are what a model sees."""


bench.add_command(faults)
bench.add_command(stability)
bench.add_command(step)
bench.add_command(truth)


@bench.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON for a program.")
def lookup(as_json: bool) -> None:
    """Nanoseconds of a plan lookup in C++ and from Python, beside a Python dict with bisect."""
    from dataclasses import asdict

    from rich.table import Table

    from dispatch.bench.lookup import run
    from dispatch.cli.render import console

    timings = run()
    if as_json:
        click.echo(json.dumps([asdict(t) for t in timings], indent=1))
        return
    table = Table(caption="medians of interleaved rounds, over random batches and lengths")
    table.add_column("buckets x boxes", justify="right")
    table.add_column("implementation")
    table.add_column("ns a lookup", justify="right")
    table.add_column("of the dict's time", justify="right")
    for t in timings:
        shape = f"{t.buckets} x {t.boxes_per_bucket}"
        table.add_row(shape, IMPLEMENTATIONS[t.implementation], f"{t.ns:.0f}", f"{t.vs_dict:.3f}")
    console().print(table)
