"""Times decode steps of a whole model, the switch on against off, over batches of production traces.

    python -m smoke.steps --model qwen3-8b --kv-tokens 640000 --trace azure_2023_conv.csv --out steps.json

The plan is tuned on the general length profiles, or read from the store: it has seen none of the traces. Weights are
random; a layer is plain torch, without the all-reduce of several ranks.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import geometric_mean
from time import monotonic
from typing import Any

import torch

from dispatch.atomic import write_atomically
from dispatch.bench.trace import read_traces
from dispatch.bench.traffic import batches
from dispatch.config import DispatchConfig
from dispatch.device import current_device
from dispatch.errors import DispatchError
from dispatch.hf_dense import read_dense
from dispatch.models import load_fields, load_model
from smoke.steps.engine import StackEngine
from smoke.steps.times import ARMS, OFF, ON, StepTimes, time_steps
from smoke.versions import versions


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m smoke.steps", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-8b", help="a preset or a config.json, of one kind of layers")
    parser.add_argument("--tp", type=int, default=1, help="ranks, of which this is one")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--kv-dtype", default=None)
    parser.add_argument("--kv-tokens", type=int, required=True, help="of the KV cache, of each layer")
    parser.add_argument("--max-seq-len", type=int, default=32768)
    parser.add_argument("--trace", type=Path, action="append", required=True, metavar="CSV")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32, 128])
    parser.add_argument("--snapshots", type=int, default=12, help="batches drawn for each trace and batch size")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
    parser.add_argument("--out", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        report = _report(options)
    except DispatchError as error:
        parser.error(str(error))
    if options.out:
        write_atomically(options.out, json.dumps(report, indent=1).encode())
    return 0


def _report(options: argparse.Namespace) -> dict[str, Any]:
    device = current_device(options.device)
    spec, *others = load_model(options.model).layer_groups(options.tp, options.page_size, options.kv_dtype)
    if others:
        raise DispatchError(f"{options.model}: layers of {1 + len(others)} kinds; these are to be all alike")
    sizes = read_dense(load_fields(options.model)[1]).split(options.tp)
    traces = {trace.name: trace for trace in read_traces(options.trace)}
    buckets = sorted(set(options.batch))
    engine = StackEngine(spec, sizes, buckets[-1], options.max_seq_len, options.kv_tokens, torch.device(device.kind))
    print(f"{device.describe()}; {options.model}, tp {options.tp}, {spec.describe()}, {spec.num_layers} layers")
    config = DispatchConfig.from_env()
    runners, seconds, captures = {}, {}, {}
    for arm in ARMS:
        start = monotonic()
        runners[arm] = engine.runner(buckets, replace(config, enabled=arm == ON))
        captures[arm] = runners[arm].trigger_init_capture()
        seconds[arm] = round(monotonic() - start, 1)
        print(f"{arm}: ready in {seconds[arm]} s, of which graphs {captures[arm].seconds:.1f} s", flush=True)
    for variant in captures[ON].variants:
        print(f"  bucket {variant.bucket}: {variant.variant} {variant.dropped}, {variant.mib:.0f} MiB")
    rows = []
    for name, trace in traces.items():
        for batch in buckets:
            drawn, share = batches(
                trace, batch, options.snapshots, options.max_seq_len, engine.pool.num_pages, spec.page_size
            )
            times = time_steps(engine, runners, drawn) if len(drawn) else []
            rows.append({"trace": name, "batch": batch, "share_that_fits": share, **_summed(times)})
            print(_line(rows[-1]), flush=True)
    (choice,) = runners[ON].choices
    return {
        "device": device.to_json(),
        "versions": versions(),
        "model": options.model,
        "tp": options.tp,
        "spec": spec.to_json(),
        "kv_tokens": options.kv_tokens,
        "seconds_to_ready": seconds,
        "why_no_plan": choice.why,
        "boxes": [] if choice.plan is None else [asdict(decided) for decided in choice.plan.boxes],
        "captures": {arm: capture.to_json() for arm, capture in captures.items()},
        "steps": rows,
    }


def _summed(times: Sequence[StepTimes]) -> dict[str, Any]:
    if not times:
        return {"batches": []}
    gains, twins = [t.gain for t in times], [t.twin for t in times]
    return {
        "gain": geometric_mean(gains),
        "worst": min(gains),
        "twin": geometric_mean(twins),
        "twin_worst": min(twins),
        "host_us": {arm: statistics.median(t.host_us[arm] for t in times) for arm in ARMS},
        "batches": [{**asdict(t), "gain": t.gain, "twin": t.twin} for t in times],
    }


def _line(row: dict[str, Any]) -> str:
    head = f"{row['trace']:22} batch {row['batch']:4}"
    if not row["batches"]:
        return f"{head}: no batch fits into the KV cache"
    served = {batch["served"] or "the default, outside every box" for batch in row["batches"]}
    return (
        f"{head}: {row['gain']:.3f}x, worst {row['worst']:.3f}x; the default against itself {row['twin']:.3f}x, "
        f"worst {row['twin_worst']:.3f}x; host {row['host_us'][ON]:.0f} and {row['host_us'][OFF]:.0f} us; "
        f"{', '.join(sorted(served))}"
    )


if __name__ == "__main__":
    sys.exit(main())
