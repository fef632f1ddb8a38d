"""`bench faults`: what the tuner does with backends that hang, crash, or compute wrong numbers."""

from __future__ import annotations

import json

import click


@click.command()
@click.argument("fault", nargs=-1)
@click.option("--device", "kind", type=click.Choice(["cuda", "cpu"]), help="[default: cuda if there is one]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for a program.")
def faults(fault: tuple[str, ...], kind: str | None, as_json: bool) -> None:
    """Tune with a backend that has one FAULT beside two sound ones; without FAULT, with each in turn.

    Ends with status 1 if a faulty backend was not refused, or cost the others their measurement.
    """
    from dataclasses import asdict

    from rich.table import Table
    from rich.text import Text

    from dispatch.bench.faults import FAULTS, run_fault
    from dispatch.cli.device import device_to_measure
    from dispatch.cli.render import console
    from dispatch.errors import ConfigError

    for name in fault:
        if name not in FAULTS:
            raise ConfigError(f"no fault {name!r}; there are {', '.join(FAULTS)}")
    device = device_to_measure(kind)
    results = []
    for name in fault or FAULTS:
        click.echo(f"{name} ...", err=True)
        results.append(run_fault(name, device))
    if as_json:
        click.echo(json.dumps({"device": device.describe(), "faults": [asdict(r) for r in results]}, indent=1))
    else:
        table = Table(title=device.describe(), title_justify="left", caption="seconds from the start to the plan")
        table.add_column("the backend")
        table.add_column("what happened", overflow="fold")
        table.add_column("others measured")
        table.add_column("seconds", justify="right")
        for r in results:
            others = "yes" if r.measured else "no"
            happened = Text(r.happened or "nothing: it was measured like the others")
            table.add_row(r.fault, happened, others, f"{r.seconds:.1f}", style="" if r.ok else "bold red")
        console().print(table)
    if not all(r.ok for r in results):
        raise SystemExit(1)
