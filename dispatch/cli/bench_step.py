"""`bench step`: what dispatching a decode step costs the host."""

from __future__ import annotations

import json

import click


@click.command()
@click.option("--model", default="qwen3-8b", show_default=True, help="A preset, or a Hugging Face config.json.")
@click.option("--tp", default=1, show_default=True, type=click.IntRange(min=1), help="Tensor-parallel ranks.")
@click.option("--page-size", default=16, show_default=True, type=click.IntRange(min=1), help="Tokens in a KV page.")
@click.option("--batch", default=64, show_default=True, type=click.IntRange(min=2), help="Rows of the bucket.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for a program.")
def step(model: str, tp: int, page_size: int, batch: int, as_json: bool) -> None:
    """Microseconds of a step's dispatch on the host, and of each backend's plan()."""
    from dataclasses import asdict

    from rich.table import Table

    from dispatch.backends import registry
    from dispatch.bench.step import step_cost
    from dispatch.cli.render import console
    from dispatch.device import current_device
    from dispatch.models import load_model

    spec = load_model(model).layer_groups(tp, page_size, None)[0]
    device = current_device()
    cost = step_cost(spec, batch, device, registry)
    if as_json:
        click.echo(json.dumps({"device": device.describe(), **asdict(cost)}, indent=1))
        return
    table = Table(title=f"{device.describe()}; batch {batch}", title_justify="left", caption="medians, on the host")
    table.add_column("what")
    table.add_column("us a step", justify="right")
    table.add_row("lengths and block table into the graph's buffers", f"{cost.refresh_us:.1f}")
    table.add_row("mean and maximum of the lengths, lookup, and count", f"{cost.choose_us:.1f}")
    for name, plan_us in cost.plan_us.items():
        table.add_row(f"plan() of {name}", f"{plan_us:.1f}")
    console().print(table)
