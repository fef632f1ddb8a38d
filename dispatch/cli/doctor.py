"""`doctor`: what is here, and what each backend says to it."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from dispatch.isolation.quarantine import Quarantined

LIBRARIES = ("torch", "flashinfer-python", "nvidia-cudnn-frontend", "tokenspeed-fa3", "triton")


@click.command()
@click.option("--model", default="qwen3-8b", show_default=True, help="A preset, or a Hugging Face config.json.")
@click.option("--tp", default=1, show_default=True, type=click.IntRange(min=1), help="Tensor-parallel ranks.")
@click.option("--page-size", default=16, show_default=True, type=click.IntRange(min=1), help="Tokens in a KV page.")
@click.option("--kv-dtype", default="auto", show_default=True, help="auto, bf16, fp16 or fp8 (e4m3).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for a program.")
def doctor(model: str, tp: int, page_size: int, kv_dtype: str, as_json: bool) -> None:
    """Say which GPU and libraries are here, and which backends serve a model's layers, or why not."""
    from rich.table import Table

    from dispatch.backends import registry
    from dispatch.bench.sanity import watch_for
    from dispatch.cli.render import console
    from dispatch.config import OPTIONS, PREFIX, DispatchConfig, unknown_variables
    from dispatch.device import current_device
    from dispatch.isolation.quarantine import SUFFIX
    from dispatch.models import load_model
    from dispatch.store import Store

    config = DispatchConfig.from_env()
    registry.check(config.exclude, "DYN_DECODE_EXCLUDE")
    for name in unknown_variables():
        known = ", ".join(option.env for option in OPTIONS if option.env.startswith(PREFIX))
        click.echo(f"warning: {name} is set, and nothing reads it; there are {known}", err=True)
    device = current_device()
    groups = load_model(model).layer_groups(tp, page_size, kv_dtype)
    store, checks = Store(config.cache_dir), watch_for(device).describe()
    unwritable = store.problem()
    held = [(path, *_quarantined(path)) for path in sorted(store.folder.glob(f"*{SUFFIX}"))]
    answers = [{name: registry.support(name, spec, device) for name in registry.names()} for spec in groups]
    if as_json:
        report = {
            "device": device.to_json(),
            "libraries": {name: _installed(name) for name in LIBRARIES},
            "enabled": config.enabled,
            "store": str(store.folder),
            "store_problem": unwritable,
            "checks": checks,
            "quarantined": [
                {"file": str(path), "layer": layer, **asdict(q), "reason": q.reason.name}
                for path, layer, entries in held
                for q in entries
            ],
            "layers": [
                {"spec": spec.to_json(), "backends": {n: {"ok": s.ok, "reason": s.reason} for n, s in answer.items()}}
                for spec, answer in zip(groups, answers, strict=True)
            ],
        }
        click.echo(json.dumps(report, indent=1))
        return
    out = console()
    out.print(f"device     {device.describe()}", highlight=False)
    out.print("libraries  " + ", ".join(f"{n} {_installed(n) or '(absent)'}" for n in LIBRARIES), highlight=False)
    switch = "on" if config.enabled else "off (set ENABLE_DYNAMIC_DECODE_BACKEND=1)"
    out.print(f"switch     {switch}", highlight=False)
    where = f"{store.folder}" + (f" (no plan can be stored: {unwritable})" if unwritable else "")
    out.print(f"store      {where}", highlight=False, markup=False, soft_wrap=True)
    out.print(f"checks     while tuning: {checks}", highlight=False)
    for path, layer, entries in held:
        for q in entries:
            line = f"quarantine {q.candidate} for {layer}: {q.describe()} ({q.since}; log: {path.with_suffix('.log')})"
            out.print(line, highlight=False, markup=False)
    if held:
        out.print("           `tune --retry-quarantined` tries them again", highlight=False)
    for spec, answer in zip(groups, answers, strict=True):
        table = Table(title=f"{model}: {spec.describe()}", title_justify="left")
        table.add_column("backend")
        table.add_column("serves it")
        table.add_column("why not")
        for name, support in answer.items():
            table.add_row(name, "yes" if support.ok else "no", support.reason)
        out.print(table)


def _quarantined(path: Path) -> tuple[str, tuple[Quarantined, ...]]:
    """The layer that a quarantine is for, and what is in it; of a file that cannot be read nothing, with a warning."""
    from dispatch.errors import PlanFileError
    from dispatch.isolation.quarantine import read_quarantine
    from dispatch.spec import AttentionSpec

    try:
        key, held = read_quarantine(path)
    except PlanFileError as error:
        click.echo(f"warning: {error}", err=True)
        return "", ()
    return AttentionSpec.from_json(key["spec"]).describe(), held


def _installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
