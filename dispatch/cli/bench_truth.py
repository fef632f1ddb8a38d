"""`bench truth`: whether what is timed here is what a model sees."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from dispatch.cli.tune import SERVED

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from dispatch.bench.truth import Truth, TruthCell

STYLES = {"right": "green", "near tie": "dim"}
WRONG_STYLE = "bold red"


@click.command()
@click.option("--model", default="qwen3-8b", show_default=True, help="A preset, or a config.json; a dense model.")
@click.option("--tp", default=1, show_default=True, type=click.IntRange(min=1), help="Tensor-parallel ranks.")
@click.option("--page-size", default=16, show_default=True, type=click.IntRange(min=1), help="Tokens in a KV page.")
@click.option("--kv-dtype", default="auto", show_default=True, help="auto (as the model), bf16, fp16 or fp8 (e4m3).")
@click.option("--batches", default="1,8,32,128", show_default=True, help="Batch sizes.")
@click.option("--mean-kv", default="1024,8192", show_default=True, help="Mean KV lengths, tokens.")
@click.option("--layers", default=4, show_default=True, type=click.IntRange(min=1), help="Layers of the stack.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for a program, with the times of every round.")
def truth(
    model: str, tp: int, page_size: int, kv_dtype: str, batches: str, mean_kv: str, layers: int, as_json: bool
) -> None:
    """Run each backend within a stack of the model's layers, and compare what it costs there with the harness.

    Needs a CUDA device. Ends with status 1 if some prediction is wrong: of the order, where the real difference to
    the default is over 3%; or by over a third of that difference and over 1 us a layer.
    """
    from dispatch.backends import registry
    from dispatch.bench.truth_run import run_truth
    from dispatch.cli.numbers import whole_numbers
    from dispatch.cli.render import console
    from dispatch.config import DispatchConfig
    from dispatch.errors import ModelError
    from dispatch.hf_dense import read_dense
    from dispatch.models import load_fields, load_model
    from dispatch.request import TuneRequest

    loaded, sizes = load_model(model), read_dense(load_fields(model)[1]).split(tp)
    spec, *others = loaded.layer_groups(tp, page_size, kv_dtype)
    if others:
        raise ModelError(f"{loaded.name}: its layers are of {1 + len(others)} kinds; the stack's are all alike")
    buckets, means = whole_numbers("--batches", batches), whole_numbers("--mean-kv", mean_kv)
    longest = min(SERVED["cuda"][1], loaded.max_position_embeddings)
    capacity = max(longest, buckets[-1] * means[-1])
    request = TuneRequest(spec, buckets, longest, capacity, DispatchConfig.from_env())

    result = run_truth(request, sizes, layers, means, registry, lambda what: click.echo(what, err=True))
    if as_json:
        click.echo(json.dumps(result.to_json(), indent=1))
    else:
        console().print(_view(f"{loaded.name}: {spec.describe()}", result))
    if not result.ok:
        raise SystemExit(1)


def _view(title: str, result: Truth) -> RenderableType:
    """The comparisons as a table, what was left out and why, and the sum of it."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from dispatch.samples import TWIN

    table = Table(
        title=f"{title}; a stack of {result.num_layers}",
        title_justify="left",
        caption=f"us a layer; differences to {result.default}, medians over rounds, without plan() on the host; "
        f"{TWIN}: its second run, the noise",
    )
    for heading in ("batch", "mean KV"):
        table.add_column(heading, justify="right")
    table.add_column("backend")
    for heading in ("attention, predicted", "real difference", "predicted difference"):
        table.add_column(heading, justify="right")
    table.add_column("verdict")
    for cell in result.cells:
        _add_rows(table, cell)
    lines = [Text(f"refused: {name}: {why}", style="dim") for name, why in result.refused.items()]
    lines += [Text(f"failed: {line}", style="red") for line in result.failed]
    right = sum(verdict.ok for verdict in result.verdicts)
    lines.append(Text(f"{right} of {len(result.verdicts)} predictions are right", style="bold"))
    return Group(table, *lines)


def _add_rows(table: Table, cell: TruthCell) -> None:
    from rich.text import Text

    for i, c in enumerate(cell.comparisons()):
        where = (str(cell.batch), str(cell.mean_kv)) if i == 0 else ("", "")
        differences = (f"{c.real_us:+.2f}", f"{c.predicted_us:+.2f}") if i else ("", "")
        verdict = "" if c.verdict is None else c.verdict.value
        style = STYLES.get(verdict, WRONG_STYLE)
        table.add_row(*where, c.backend, f"{c.attention_us:.1f}", *differences, Text(verdict, style=style))
    table.add_section()
