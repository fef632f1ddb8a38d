"""`tune`: the main job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from dispatch.config import OPTIONS, DispatchConfig

# What a machine of each kind serves. (largest batch, longest sequence in tokens)
SERVED = {"cuda": (256, 65536), "cpu": (8, 2048)}


def config_options(command: Callable[..., None]) -> Callable[..., None]:
    """The engine's flags, all but the switch: who runs `tune` has switched it on. Here they need no prefix."""
    for option in reversed(OPTIONS):
        if option.name != "enabled":
            dashed = option.dest.replace("_", "-")
            names = (option.flag, f"--{dashed}", f"--{dashed.removeprefix('dyn-decode-')}", option.name)
            command = click.option(*names, metavar="VALUE", help=f"{option.help} [{option.env}]")(command)
    return command


@click.command()
@click.option("--model", required=True, help="A preset, or a Hugging Face config.json.")
@click.option("--tp", default=1, show_default=True, type=click.IntRange(min=1), help="Tensor-parallel ranks.")
@click.option("--page-size", default=16, show_default=True, type=click.IntRange(min=1), help="Tokens in a KV page.")
@click.option("--kv-dtype", default="auto", show_default=True, help="auto (as the model), bf16, fp16 or fp8 (e4m3).")
@click.option(
    "--kv-capacity",
    type=click.IntRange(min=1),
    help="KV tokens the server holds. [default: what fits; on a GPU, beside the weights]",
)
@click.option("--max-batch-size", type=click.IntRange(min=1), help="Largest batch. [default: 256; on a CPU 8]")
@click.option("--buckets", help="Captured batch sizes, as 1,2,4,8. [default: spaced as engines do]")
@click.option("--max-seq-len", type=click.IntRange(min=1), help="Longest request, tokens. [65536; on a CPU 2048]")
@click.option("--default", "default", help="Backend that the others must beat. [default: first in priority]")
@click.option(
    "--trace",
    "traces",
    multiple=True,
    type=click.Path(path_type=Path),
    help="CSV of requests: input_tokens,output_tokens. May be given more than once.",
)
@click.option("--plan-hidden", is_flag=True, help="The engine plans a step while another runs: plan() is free.")
@click.option("--finite-kv", is_flag=True, help="The engine zeroes its KV cache and never lets NaN into it.")
@click.option("--lengths-ahead", is_flag=True, help="The engine schedules ahead: the host knows only upper bounds.")
@click.option("--device", "kind", type=click.Choice(["cuda", "cpu"]), help="[default: cuda if there is one]")
@config_options
@click.option("--force", is_flag=True, help="Measure again; the stored choices stay unless they are beaten.")
@click.option("--retry-quarantined", is_flag=True, help="Try again what failed in a child process; `doctor` lists it.")
@click.option("--out", type=click.Path(path_type=Path), help="Also write the plan here, for machines like this one.")
@click.option("--plan", "plan_file", type=click.Path(path_type=Path), help="Use this plan file; measure nothing.")
@click.option("--profile-time", is_flag=True, help="Also print where the time went.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for a program.")
def tune(
    model: str,
    tp: int,
    page_size: int,
    kv_dtype: str,
    kv_capacity: int | None,
    max_batch_size: int | None,
    buckets: str | None,
    max_seq_len: int | None,
    default: str | None,
    traces: tuple[Path, ...],
    plan_hidden: bool,
    finite_kv: bool,
    lengths_ahead: bool,
    kind: str | None,
    force: bool,
    retry_quarantined: bool,
    out: Path | None,
    plan_file: Path | None,
    profile_time: bool,
    as_json: bool,
    **settings: Any,
) -> None:
    """Measure which backend is stably fastest for each batch size and length, and store the plan."""
    from dispatch.atomic import check_writable
    from dispatch.backends import registry
    from dispatch.bench.phases import Phases
    from dispatch.bench.trace import read_traces
    from dispatch.cli.capacity import default_capacity
    from dispatch.cli.device import device_to_measure
    from dispatch.cli.progress import progress_bar
    from dispatch.cli.render import console, phases_view
    from dispatch.cli.tuned import print_json, print_tables, write_out
    from dispatch.cli.write import write_file
    from dispatch.models import load_model
    from dispatch.obtain import obtain_plan, plan_from_file
    from dispatch.request import TuneRequest
    from dispatch.store import Store
    from dispatch.traits import EngineTraits

    if plan_file is not None and (force or retry_quarantined):
        flag = "--force" if force else "--retry-quarantined"
        raise click.UsageError(f"{flag} measures and --plan does not: give one of them")
    if out is not None:
        write_file(out, check_writable)
    config = DispatchConfig.from_env(**settings)
    if settings["exclude"] is not None:
        registry.check(config.exclude, "--dyn_decode_exclude")
    loaded = load_model(model)
    groups = loaded.layer_groups(tp, page_size, kv_dtype)
    device = device_to_measure(kind)
    most, longest = SERVED[device.kind]
    max_seq_len = max_seq_len or min(longest, loaded.max_position_embeddings)
    served = _buckets(buckets, max_batch_size, most)
    if kv_capacity is None:
        capacity, limit = default_capacity(model, tp, device, groups, served[-1] * max_seq_len)
    else:
        capacity, limit = kv_capacity, "as given"
    traffic = read_traces(traces)
    traits = EngineTraits(plan_hidden, finite_kv, exact_lengths=not lengths_ahead)
    requests = [TuneRequest(spec, served, max_seq_len, capacity, config, default, traffic, traits) for spec in groups]
    store, phases = Store(config.cache_dir), Phases()
    obtained = []
    for request in requests:
        if plan_file is not None:
            obtained.append(plan_from_file(plan_file, request, device, registry, store))
            continue
        with progress_bar(request, quiet=as_json) as progress:
            obtained.append(obtain_plan(request, device, registry, store, progress, force, phases, retry_quarantined))
    written = ""
    try:
        if out is not None:  # first: what is printed to may be closed by now
            written = write_out(out, obtained)
    finally:
        if as_json:
            print_json(obtained)
        else:
            print_tables(f"{loaded.name} on {device.describe()}", requests[0], limit, obtained)
    if written and not as_json:
        click.echo(written)
    if profile_time and phases.seconds:
        console(stderr=as_json).print(phases_view(phases.seconds))


def _buckets(text: str | None, max_batch_size: int | None, most: int) -> tuple[int, ...]:
    from dispatch.errors import ConfigError
    from dispatch.grid import capture_buckets, check_buckets

    if text is None:
        return capture_buckets(max_batch_size or most)
    try:
        listed = check_buckets([int(item) for item in text.split(",")])
    except ValueError:
        raise ConfigError(f"--buckets {text!r}: must be whole numbers separated by commas") from None
    if max_batch_size is not None and max_batch_size != listed[-1]:
        raise ConfigError(f"--max-batch-size {max_batch_size} is not the last of --buckets {text}")
    return listed
