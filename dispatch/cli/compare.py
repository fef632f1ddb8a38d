"""`compare`: a plan against the default, each fixed backend and the best of each batch, on real traffic."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command()
@click.argument("plan", type=click.Path(path_type=Path))
@click.option(
    "--trace",
    "traces",
    required=True,
    multiple=True,
    type=click.Path(path_type=Path),
    help="CSV of requests: input_tokens,output_tokens. May be given more than once.",
)
@click.option("--batch-size", help="As 1,2,4,8. [default: the powers of 2 up to the plan's largest bucket]")
@click.option("--snapshots", default=24, show_default=True, type=click.IntRange(min=1), help="Of each size and trace.")
@click.option("--rounds", default=9, show_default=True, type=click.IntRange(min=2), help="In which each one is timed.")
@click.option("--seed", default=4, show_default=True, type=click.IntRange(min=0), help="Another one: other snapshots.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the JSON, with every time, to this file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for a program, with every time.")
def compare(
    plan: Path,
    traces: tuple[Path, ...],
    batch_size: str | None,
    snapshots: int,
    rounds: int,
    seed: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Time PLAN, made by `tune --out` on a machine like this one, and its rivals on batches of real traffic.

    A batch is what a server sees at a random step that replaces each finished request by the next of the trace. The
    rivals are the default, each backend alone, a plan tuned on equal lengths, and the fastest candidate of each batch,
    found in every other round and timed in the rest.
    """
    from dispatch.atomic import check_writable, write_atomically
    from dispatch.backends import registry
    from dispatch.bench.compare_plan import is_for_cpu
    from dispatch.bench.compare_run import Sizes, run_comparison
    from dispatch.bench.trace import read_traces
    from dispatch.cli.compare_view import comparison_view
    from dispatch.cli.device import device_to_measure
    from dispatch.cli.files import find_plans
    from dispatch.cli.numbers import whole_numbers
    from dispatch.cli.render import console
    from dispatch.cli.write import write_file
    from dispatch.errors import PlanFileError

    if out is not None:
        write_file(out, check_writable)
    _, found = find_plans(plan)
    if not found:
        raise PlanFileError(f"{plan}: no plan in it")
    if any(is_for_cpu(stored) for stored, _ in found):
        device_to_measure("cpu")  # as `tune` did
    requests = {trace.name: trace for trace in read_traces(traces)}
    compared = []
    for stored, samples in found:
        most = stored.buckets[-1]
        sizes = tuple(2**i for i in range(most.bit_length())) if batch_size is None else ()
        wanted = Sizes(sizes or whole_numbers("--batch-size", batch_size or ""), snapshots, rounds, seed)
        compared.append(
            run_comparison(plan, stored, samples, requests, wanted, registry, lambda what: click.echo(what, err=True))
        )
    content = json.dumps({"comparisons": [each.to_json() for each in compared]}, indent=1)
    if out is not None:
        write_file(out, lambda path: write_atomically(path, content.encode()))
    if as_json:
        click.echo(content)
        return
    for each in compared:
        console().print(comparison_view(each))
