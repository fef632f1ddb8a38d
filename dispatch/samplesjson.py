"""Samples as plain JSON data, and back, without loss. What is read is checked, field by field."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dispatch.candidate import Candidate
from dispatch.decision import Rule
from dispatch.key import check_key
from dispatch.plainjson import each, field, mapping, named, number, sequence, shown, text, whole
from dispatch.planfile import box_from_json, box_to_json, candidate_from_json, reason_from_json, unmeasured_from_json
from dispatch.samples import LONGEST_US, PARTS, TWIN, BucketSamples, Cell, Exclusion, Samples


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
        "means": bucket.means.tolist(),
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
    longest, means = (field(data, name, _lengths_from_json) for name in ("longest", "means"))
    for name, lengths in (("longest", longest), ("means", means)):
        if lengths.shape != times[0].shape[1:]:
            raise ValueError(f"{name}: {lengths.shape} lengths for {times[0].shape[1:]} cells and rounds")
    if (longest < means).any() or ((longest > 0) != (means > 0)).any():
        raise ValueError("means: above the longest, or in other rounds")
    return BucketSamples(field(data, "bucket", whole), cells, candidates, np.stack(times), longest, means, exclusions)


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
        field(data, "tie", number),
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


def _lengths_from_json(value: Any) -> NDArray[np.int64]:
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
