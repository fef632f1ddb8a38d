"""The samples file: every raw time of the tuning runs of a model's layer groups, as gzipped JSON without loss."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dispatch import readfile
from dispatch.atomic import write_atomically
from dispatch.candidate import Candidate
from dispatch.decision import Rule
from dispatch.errors import SamplesError
from dispatch.key import check_key
from dispatch.plainjson import each, field, mapping, named, number, parse, sequence, shown, text, whole
from dispatch.planfile import box_from_json, box_to_json, candidate_from_json, reason_from_json, unmeasured_from_json
from dispatch.samples import LONGEST_US, PARTS, TWIN, BucketSamples, Cell, Exclusion, Samples

FORMAT = 2  # since 2 with the longest request of each round
SUFFIX = ".samples.json.gz"
# Unpacking stops here, lest a damaged or a hostile file take all memory. A layer group of 23 buckets, 13 candidates,
# 40 cells, 15 rounds and 3 parts, at 8 characters a time, is 4 MiB; few models have more than three groups. Such a text
# is 4 times its compressed size, and where most candidates were dropped, up to 20 times.
LARGEST_BYTES = readfile.LARGEST_BYTES
_MOST_TIMES = 64
_SMALL_BYTES = 1 << 20


def samples_path(plan_path: Path) -> Path:
    """Where the samples of a plan file lie: beside it."""
    return plan_path.with_name(plan_path.name.removesuffix(".json") + SUFFIX)


def read_beside(plan_path: Path, keys: Sequence[Mapping[str, Any]]) -> list[Samples | None]:
    """The samples of each of these keys, where they lie beside the plan file. Raises SamplesError."""
    path = samples_path(plan_path)
    runs = read_samples(path) if path.exists() else ()
    return [next((run for run in runs if run.key == key), None) for key in keys]


def write_samples(path: Path, runs: Sequence[Samples]) -> None:
    """Write a samples file. Raises OSError."""
    body = {"format": FORMAT, "runs": [samples_to_json(run) for run in runs]}
    content = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
    write_atomically(path, gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)


def read_samples(path: Path) -> tuple[Samples, ...]:
    """Read a samples file, gzipped or not. Raises SamplesError, naming file and field."""
    try:
        content = _content(path)
    except (OSError, ValueError, zlib.error) as error:
        raise SamplesError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    body = parse(content, path, FORMAT, SamplesError)
    try:
        return field(body, "runs", lambda runs: each(runs, samples_from_json))
    except (ValueError, RecursionError) as error:
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
    """Inverse of `samples_to_json`. Raises ValueError, naming the field."""
    data = mapping(value)
    key = field(data, "key", check_key)
    buckets = field(data, "buckets", lambda v: each(v, _bucket_from_json))
    named("buckets", lambda: _check_against(key, buckets))
    return Samples(
        key=key,
        num_layers=field(data, "num_layers", whole),
        default=field(data, "default", candidate_from_json),
        priority=field(data, "priority", lambda v: each(v, text)),
        rule=field(data, "rule", _rule),
        buckets=buckets,
        unmeasured=field(data, "unmeasured", unmeasured_from_json),
        incumbent=field(data, "incumbent", lambda v: each(v, box_from_json)),
    )


def _bucket_to_json(bucket: BucketSamples) -> dict[str, Any]:
    return {
        "bucket": bucket.bucket,
        "cells": [[c.mean_kv, c.max_kv, c.profile] for c in bucket.cells],
        "candidates": list(bucket.candidates),
        "longest": bucket.longest.tolist(),
        "exclusions": [[e.candidate, e.reason.name, e.detail, e.cell] for e in bucket.exclusions],
        **{name: _times_to_json(times) for name, times in zip(PARTS, bucket.times, strict=True)},
    }


def _bucket_from_json(value: Any) -> BucketSamples:
    data = mapping(value)
    cells = field(data, "cells", lambda v: each(v, _cell))
    candidates = field(data, "candidates", _candidates)
    times = [field(data, part, _times_from_json) for part in PARTS]
    for part, of_part in zip(PARTS, times, strict=True):
        shape = (len(candidates), len(cells), times[0].shape[2])
        if of_part.shape != shape:
            raise ValueError(f"{part}: {of_part.shape} times for {shape} candidates, cells, and rounds")
    exclusions = field(data, "exclusions", lambda v: each(v, lambda e: _exclusion(e, len(cells))))
    longest = field(data, "longest", _longest_from_json)
    if longest.shape != times[0].shape[1:]:
        raise ValueError(f"longest: {longest.shape} lengths for {times[0].shape[1:]} cells and rounds")
    return BucketSamples(field(data, "bucket", whole), cells, candidates, np.stack(times), longest, exclusions)


def _check_against(key: dict[str, Any], buckets: Sequence[BucketSamples]) -> None:
    """Raises ValueError where a plan made of these samples would name what its key does not."""
    sizes = [bucket.bucket for bucket in buckets]
    if len(set(sizes)) != len(sizes) or not set(sizes) <= set(key["buckets"]):
        raise ValueError(f"{shown(sizes)}: must be among the key's {shown(key['buckets'])}, each once")
    for name in (name for bucket in buckets for name in bucket.candidates if name != TWIN):
        if Candidate.parse(name).backend not in key["backends"]:
            raise ValueError(f"candidates: {shown(name)} is of no backend in the key")


def _rule(value: Any) -> Rule:
    data = mapping(value)
    return Rule(
        field(data, "threshold", number),
        field(data, "cluster_margin", number),
        field(data, "min_rounds", whole),
        field(data, "win_share", number),
        field(data, "cell_win_share", number),
        field(data, "loss", number),
        field(data, "lost_share", number),
    )


def _candidates(value: Any) -> tuple[str, ...]:
    names = each(value, lambda name: TWIN if name == TWIN else candidate_from_json(name))
    if len(set(names)) != len(names) or names[1:2] != (TWIN,):
        raise ValueError("must be the default, its twin, and others, each once")
    return names


def _cell(value: Any) -> Cell:
    mean_kv, max_kv, profile = sequence(value, 3)
    if not 0 < whole(mean_kv) <= whole(max_kv) < 2**31:
        raise ValueError(f"{shown(value)}: 0 < mean KV <= max KV < 2^31 does not hold")
    return Cell(mean_kv, max_kv, text(profile))


def _exclusion(value: Any, num_cells: int) -> Exclusion:
    candidate, reason, detail, cell = sequence(value, 4)
    if cell is not None and not 0 <= whole(cell) < num_cells:
        raise ValueError(f"{shown(candidate)}: there is no cell {shown(cell)}")
    return Exclusion(text(candidate), reason_from_json(reason), text(detail), cell)


def _times_to_json(times: NDArray[np.float64]) -> Any:
    return [[[None if t != t else t for t in rounds] for rounds in cells] for cells in times.tolist()]


def _times_from_json(value: Any) -> NDArray[np.float64]:
    rows = each(value, lambda cells: each(cells, lambda rounds: each(rounds, _time)))
    try:
        times = np.array(rows, dtype=np.float64)
    except ValueError:
        times = np.empty(0)  # rows of different lengths
    if times.ndim != 3:
        raise ValueError("not a table [candidate][cell][round]")
    return times


def _longest_from_json(value: Any) -> NDArray[np.int64]:
    rows = each(value, lambda rounds: each(rounds, _length))
    try:
        longest = np.array(rows, dtype=np.int64)
    except ValueError:
        longest = np.empty(0, dtype=np.int64)  # rows of different lengths
    if longest.ndim != 2:
        raise ValueError("not a table [cell][round]")
    return longest


def _length(value: Any) -> int:
    if not 0 < whole(value) < 2**31:
        raise ValueError(f"{shown(value)} is no length of a request")
    return int(value)


def _time(value: Any) -> float:
    if value is None:
        return math.nan
    if not 0 <= number(value) <= LONGEST_US:
        raise ValueError(f"{shown(value)} is not a time")
    return float(value)


def _content(path: Path) -> bytes:
    content = readfile.read_file(path, LARGEST_BYTES)
    if content[:2] != b"\x1f\x8b":
        return content
    largest = min(LARGEST_BYTES, _MOST_TIMES * len(content) + _SMALL_BYTES)
    unpacker = zlib.decompressobj(wbits=31)  # gzip's header and checksum too
    text = unpacker.decompress(content, largest + 1)
    if len(text) > largest:
        raise readfile.too_large(largest)
    if not unpacker.eof or unpacker.unused_data:
        raise ValueError("the compressed data ends too early, or is followed by other data")
    return text
