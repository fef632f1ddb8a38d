"""The samples file: every raw time of the tuning runs of a model's layer groups, as gzipped JSON without loss."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dispatch.atomic import write_atomically
from dispatch.candidate import Candidate
from dispatch.decision import Rule
from dispatch.errors import DispatchError, SamplesError
from dispatch.plainjson import field, mapping, number, parse, sequence, shown, text, whole
from dispatch.planfile import box_from_json, box_to_json, reason_from_json
from dispatch.samples import PARTS, TWIN, BucketSamples, Cell, Exclusion, Samples

FORMAT = 1
SUFFIX = ".samples.json.gz"


def samples_path(plan_path: Path) -> Path:
    """Where the samples of a plan file lie: beside it."""
    return plan_path.with_name(plan_path.name.removesuffix(".json") + SUFFIX)


def write_samples(path: Path, runs: Sequence[Samples]) -> None:
    """Write a samples file. Raises OSError."""
    body = {"format": FORMAT, "runs": [samples_to_json(run) for run in runs]}
    content = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
    write_atomically(path, gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)


def read_samples(path: Path) -> tuple[Samples, ...]:
    """Read a samples file, gzipped or not. Raises SamplesError, naming file and field."""
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise SamplesError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    body = parse(content, path, SamplesError)
    if body.get("format") != FORMAT:
        raise SamplesError(f"{path}: format: {shown(body.get('format'))}; this version reads {FORMAT}")
    try:
        return tuple(samples_from_json(run) for run in sequence(field(body, "runs")))
    except (DispatchError, ValueError, TypeError) as error:
        raise SamplesError(f"{path}: {error}") from None


def samples_to_json(samples: Samples) -> dict[str, Any]:
    """Plain data; `samples_from_json` gives the same decisions."""
    return {
        "key": dict(samples.key),
        "num_layers": samples.num_layers,
        "default": samples.default,
        "priority": list(samples.priority),
        "rule": asdict(samples.rule),
        "unmeasured": {str(bucket): reason for bucket, reason in samples.unmeasured.items()},
        "incumbent": [box_to_json(box) for box in samples.incumbent],
        "buckets": [_bucket_to_json(bucket) for bucket in samples.buckets],
    }


def samples_from_json(value: Any) -> Samples:
    """Inverse of `samples_to_json`. Raises ValueError or DispatchError."""
    data = mapping(value)
    rule = mapping(field(data, "rule"))
    return Samples(
        key=mapping(field(data, "key")),
        num_layers=whole(field(data, "num_layers")),
        default=str(Candidate.parse(text(field(data, "default")))),
        priority=tuple(text(name) for name in sequence(field(data, "priority"))),
        rule=Rule(
            number(field(rule, "threshold")),
            number(field(rule, "cluster_margin")),
            whole(field(rule, "min_rounds")),
            number(field(rule, "win_share")),
        ),
        buckets=tuple(_bucket_from_json(bucket) for bucket in sequence(field(data, "buckets"))),
        unmeasured={int(b): text(reason) for b, reason in mapping(field(data, "unmeasured")).items()},
        incumbent=tuple(box_from_json(box) for box in sequence(field(data, "incumbent"))),
    )


def _bucket_to_json(bucket: BucketSamples) -> dict[str, Any]:
    return {
        "bucket": bucket.bucket,
        "cells": [[c.mean_kv, c.max_kv, c.profile] for c in bucket.cells],
        "candidates": list(bucket.candidates),
        "exclusions": [[e.candidate, e.reason.name, e.detail, e.cell] for e in bucket.exclusions],
        **{name: _times_to_json(times) for name, times in zip(PARTS, bucket.times, strict=True)},
    }


def _bucket_from_json(value: Any) -> BucketSamples:
    data = mapping(value)
    cells = tuple(_cell(cell) for cell in sequence(field(data, "cells")))
    candidates = tuple(text(name) for name in sequence(field(data, "candidates")))
    if len(set(candidates)) != len(candidates) or candidates[1:2] != (TWIN,):
        raise ValueError("candidates: must be the default, its twin, and others, each once")
    for name in candidates:
        if name != TWIN:
            Candidate.parse(name)
    times = np.array([_times_from_json(field(data, part), part) for part in PARTS], dtype=np.float64)
    if times.ndim != 4 or times.shape[1:3] != (len(candidates), len(cells)):
        raise ValueError(f"times of shape {times.shape[1:]} for {len(candidates)} candidates and {len(cells)} cells")
    exclusions = tuple(_exclusion(e, len(cells)) for e in sequence(field(data, "exclusions")))
    return BucketSamples(whole(field(data, "bucket")), cells, candidates, times, exclusions)


def _cell(value: Any) -> Cell:
    mean_kv, max_kv, profile = sequence(value, 3)
    if not 0 < whole(mean_kv) <= whole(max_kv) < 2**31:
        raise ValueError(f"cell {shown(value)}: 0 < mean KV <= max KV < 2^31 does not hold")
    return Cell(mean_kv, max_kv, text(profile))


def _exclusion(value: Any, num_cells: int) -> Exclusion:
    candidate, reason, detail, cell = sequence(value, 4)
    if cell is not None and not 0 <= whole(cell) < num_cells:
        raise ValueError(f"exclusion of {shown(candidate)}: there is no cell {shown(cell)}")
    return Exclusion(text(candidate), reason_from_json(reason), text(detail), cell)


def _times_to_json(times: NDArray[np.float64]) -> Any:
    return [[[None if t != t else t for t in rounds] for rounds in cells] for cells in times.tolist()]


def _times_from_json(value: Any, part: str) -> NDArray[np.float64]:
    try:
        times = np.array(value, dtype=np.float64)  # None becomes NaN
    except (TypeError, ValueError):
        raise ValueError(f"{part}: not a table of numbers [candidate][cell][round]") from None
    if times.ndim != 3 or np.isinf(times).any() or (times < 0).any():
        raise ValueError(f"{part}: not a table of times [candidate][cell][round]")
    return times
