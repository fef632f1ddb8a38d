"""Rows of the table that come out of samples files: of plans, and 1b, 2, 3 and 8."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dispatch.errors import one_line
from dispatch.samples import Samples
from dispatch.samplesfile import read_samples
from dispatch.spec import AttentionSpec
from smoke.facts.chosen import gains, held_out
from smoke.facts.samples import (
    COMPARED,
    LARGE_BYTES,
    Speeds,
    backend_ratios,
    best_gain,
    equal_tuned,
    fastest_bandwidth,
    kernel_cost,
    own_rule,
    step_cost,
    trace_cells,
)
from smoke.facts.table import Found, Row

# By heads: (geometric mean of t_fa3 / t_pick), as DESIGN 2.1 and 2.2 have them from their data.
EQUAL_TUNED = {(8, 1): "0.84", (32, 8): "0.93", (64, 8): "0.93"}
ON_TRACES = {
    (8, 1): {"flashinfer_cudnn": "1.21", "flashinfer_xqa": "1.73", "flashinfer_fa2_tc": "0.98"},
    (32, 8): {"flashinfer_cudnn": "1.16", "flashinfer_xqa": "1.28", "flashinfer_fa2_tc": "1.09"},
}
BEST = {(8, 1): "1.07, over 10% in 26%, up to 1.37", (32, 8): "1.06, over 10% in 24%, up to 1.33"}
FP8_BEST = {1: "1.58 (XQA)", 8: "1.05", 32: "1.01 (FA3)", 128: "1.19"}


def from_samples(paths: Iterable[Path]) -> Found:
    """Everything that the files tell. What a file does not tell is a row that says why."""
    rows: list[Row] = []
    raw: dict[str, Any] = {}
    for path in paths:
        for samples in read_samples(path):
            spec = AttentionSpec.from_json(dict(samples.key["spec"]))
            where = f"{path.name.removesuffix('.samples.json.gz')} ({spec.describe()})"
            facts: dict[str, Callable[[Samples, AttentionSpec], tuple[list[Row], Any]]] = {
                "1b": _equal_tuned,
                "2": _traces,
                "8": _bandwidth,
            }
            if spec.kv_dtype == "fp8_e4m3":
                facts = {"3": _fp8, "8": _bandwidth}
            facts = {"plan": _plan, **facts}
            for fact, work in facts.items():
                try:
                    found, raw[f"{fact}: {path}: {spec.describe()}"] = work(samples, spec)
                except Exception as error:
                    found = [Row(f"{fact}", "", f"failed: {one_line(error)}")]
                rows += [Row(f"{row.fact}: {where}", row.then, row.now, row.note) for row in found]
    return Found(tuple(rows), raw)


def _plan(samples: Samples, spec: AttentionSpec) -> tuple[list[Row], Any]:
    found, judged = gains(samples), held_out(samples)
    rows = [
        Row(
            "plan: speed over fa3 of the boxes with another candidate, cross-fitted",
            "",
            f"{found.least:.2f} to {found.most:.2f}, median {found.median:.2f}",
            f"{found.other_boxes} of {found.boxes} boxes",
        ),
        Row(
            "plan: speed over fa3 of all batches, on the rounds that chose",
            "",
            f"{found.mean:.3f}",
            f"{found.batches} batches",
        ),
        Row(
            "plan: half of the rounds decides, the other scores: batches of another candidate slower than fa3 by 3%",
            "",
            f"{judged.slower} of {judged.batches}",
            f"fa3's own second run: {judged.twin_slower}; speed over fa3 of all batches {judged.mean:.3f}",
        ),
    ]
    return rows, {"gains": asdict(found), "held_out": asdict(judged)}


def _equal_tuned(samples: Samples, spec: AttentionSpec) -> tuple[list[Row], Any]:
    then = EQUAL_TUNED.get((spec.num_qo_heads, spec.num_kv_heads), "")
    source = f"{then}, worst of all 0.22 (h200_chain_uniform_ragged.json)" if then else ""
    tuned = {"kernels alone": equal_tuned(samples, kernel_cost), "with plan()": equal_tuned(samples, step_cost)}
    rule = own_rule(samples, step_cost)
    rows = [
        Row(f"1b speed over fa3 of a plan tuned on equal lengths, {how}", source, _shown(speeds), _counted(speeds))
        for how, speeds in tuned.items()
    ]
    rows.append(Row("1b speed over fa3 of our rule's plan, with plan()", "at least 1", _shown(rule), _counted(rule)))
    raw = {**{how: asdict(speeds) for how, speeds in tuned.items()}, "rule": asdict(rule)}
    return rows, raw


def _shown(speeds: Speeds) -> str:
    return f"{speeds.mean:.3f}, worst {speeds.worst:.2f}"


def _counted(speeds: Speeds) -> str:
    return f"{speeds.cells} cells" + (f", {speeds.unmeasured} unmeasured" if speeds.unmeasured else "")


def _traces(samples: Samples, spec: AttentionSpec) -> tuple[list[Row], Any]:
    heads = (spec.num_qo_heads, spec.num_kv_heads)
    if not any(trace_cells(bucket) for bucket in samples.buckets if bucket.bucket > 1):
        return [Row("2 trace", "", "no cells of a trace in this file")], None
    rows = []
    ratios = backend_ratios(samples, kernel_cost)
    for name, found in ratios.items():
        then = ON_TRACES.get(heads, {}).get(name, "")
        rows.append(
            Row(
                f"2 trace: {name} over fa3, geometric mean of times",
                f"{then} (h200_traces.json)" if then else "",
                f"{found.geometric_mean:.2f} ({found.least:.2f} to {found.most:.2f})",
                f"{found.cells} cells; arithmetic mean {found.mean:.2f}",
            )
        )
    gain = best_gain(samples, kernel_cost)
    by_bucket = {bucket.bucket: best_gain(samples, kernel_cost, [bucket.bucket]) for bucket in samples.buckets}
    if gain:
        means = ", ".join(f"{bucket}: {found.mean:.2f}" for bucket, found in by_bucket.items() if found)
        rows.append(
            Row(
                f"2 trace: fa3 over the best of {', '.join(COMPARED)}",
                f"{BEST[heads]} (h200_traces.json)" if heads in BEST else "",
                f"{gain.mean:.3f}, over 10% in {gain.share_over_10_percent:.0%}, up to {gain.most:.2f}",
                f"{gain.cells} cells; by batch {means}",
            )
        )
    return rows, {
        "over_fa3": {name: asdict(found) for name, found in ratios.items()},
        "best": asdict(gain) if gain else None,
        "best_by_bucket": {str(bucket): asdict(found) for bucket, found in by_bucket.items() if found},
    }


def _fp8(samples: Samples, spec: AttentionSpec) -> tuple[list[Row], Any]:
    rows, raw = [], {}
    there = {bucket.bucket for bucket in samples.buckets}
    for batch, then in FP8_BEST.items():
        gain = best_gain(samples, kernel_cost, [batch]) if batch in there else None
        now = f"{gain.mean:.2f}, up to {gain.most:.2f}" if gain else "no cells of a trace in this file"
        fact = f"3 fp8: fa3 over the best, batch {batch}"
        rows.append(Row(fact, f"{then} (h200_traces_fp8.json)", now, f"{gain.cells} cells" if gain else ""))
        raw[str(batch)] = asdict(gain) if gain else None
    return rows, raw


def _bandwidth(samples: Samples, spec: AttentionSpec) -> tuple[list[Row], Any]:
    cells = fastest_bandwidth(samples)
    large = [tb_per_s for _, _, kv_bytes, tb_per_s in cells if kv_bytes > LARGE_BYTES]
    short = [tb_per_s for bucket, mean_kv, _, tb_per_s in cells if bucket == 8 and 1000 <= mean_kv <= 2000]
    now = f"median {statistics.median(large):.2f}, best {max(large):.2f}" if large else "no such cell"
    rows = [
        Row(
            "8 TB/s of the fastest candidate, over 200 MB a layer",
            "median 3.8, best 4.5 (DESIGN 2)",
            now,
            f"{len(large)} cells",
        )
    ]
    if short:
        rows.append(Row("8 TB/s at batch 8, mean KV 1000 to 2000", "2 (DESIGN 2)", f"{statistics.median(short):.2f}"))
    return rows, [list(cell) for cell in cells]
