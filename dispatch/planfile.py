"""The plan file: the plans of a model's layer groups as checked JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from dispatch.atomic import write_atomically
from dispatch.candidate import Candidate
from dispatch.decision import Reason
from dispatch.errors import PlanFileError
from dispatch.key import check_key, digest
from dispatch.plainjson import each, field, mapping, named, number, parse, sequence, shown, text, whole
from dispatch.plan import DecidedBox, Excluded, StoredPlan
from dispatch.readfile import GZIP, read_file
from dispatch.samples import Box

FORMAT = 2  # since 2 with the skew of boxes


def write_plans(path: Path, plans: Sequence[StoredPlan]) -> None:
    """Write a plan file with its checksum. Raises OSError."""
    body = {"format": FORMAT, "plans": [plan_to_json(plan) for plan in plans]}
    write_atomically(path, json.dumps({**body, "checksum": digest(body)}, indent=1).encode() + b"\n")


def read_plans(path: Path) -> tuple[StoredPlan, ...]:
    """Read a plan file. Raises PlanFileError, naming file and field, for whatever is wrong with it."""
    try:
        content = read_file(path)
    except OSError as error:
        raise PlanFileError(f"{path}: {error.strerror}") from None
    if content[:2] == GZIP:
        raise PlanFileError(f"{path}: compressed, as samples are, which `select` reads, and plan files are not")
    body = parse(content, path, "plans", FORMAT, PlanFileError)
    checksum = body.pop("checksum", None)
    try:
        if digest(body) != checksum:
            raise ValueError("checksum: the file was changed or damaged")
        return field(body, "plans", lambda plans: each(plans, plan_from_json))
    except (ValueError, RecursionError) as error:
        raise PlanFileError(f"{path}: {error}") from None


def plan_to_json(plan: StoredPlan) -> dict[str, Any]:
    """Plain data; `plan_from_json` gives an equal plan."""
    return {
        "key": dict(plan.key),
        "created": plan.created,
        "default": plan.default,
        "buckets": list(plan.buckets),
        "boxes": [{**box_to_json(d.box), "reason": d.reason.name, "speedup": d.speedup} for d in plan.boxes],
        "unmeasured": {str(bucket): reason for bucket, reason in plan.unmeasured.items()},
        "excluded": [[e.bucket, e.candidate, e.reason.name, e.detail] for e in plan.excluded],
        "refused": dict(plan.refused),
        "seconds": plan.seconds,
    }


def plan_from_json(value: Any) -> StoredPlan:
    """Inverse of `plan_to_json`, checked as far as making the table. Raises PlanFileError, naming the field."""
    try:
        data = mapping(value)
        plan = StoredPlan(**{f.name: field(data, f.name, _READERS[f.name]) for f in fields(StoredPlan)})
        named("boxes", plan.table)
    except ValueError as error:
        raise PlanFileError(str(error)) from None
    return plan


def box_to_json(box: Box) -> dict[str, Any]:
    """{"bucket": 8, "mean_kv": [128, 900], "skew": [1000, 4500], "candidate": "fa3"}"""
    return {
        "bucket": box.bucket,
        "mean_kv": [box.mean_kv_min, box.mean_kv_max],
        "skew": [box.skew_min, box.skew_max],
        "candidate": box.candidate,
    }


def box_from_json(value: Any) -> Box:
    """Inverse of `box_to_json`. Raises ValueError, naming the field."""
    data = mapping(value)
    mean_kv_min, mean_kv_max = field(data, "mean_kv", _bounds)
    skew_min, skew_max = field(data, "skew", _bounds)
    candidate = field(data, "candidate", candidate_from_json)
    return Box(field(data, "bucket", whole), mean_kv_min, mean_kv_max, skew_min, skew_max, candidate)


def candidate_from_json(value: Any) -> str:
    """A candidate as it is written in plans and samples. Raises ValueError or DispatchError."""
    return str(Candidate.parse(text(value)))


def reason_from_json(value: Any) -> Reason:
    """A reason by its name. Raises ValueError."""
    if text(value) not in Reason.__members__:
        raise ValueError(f"{shown(value)} is not a reason")
    return Reason[value]


def unmeasured_from_json(value: Any) -> dict[int, str]:
    """Buckets, which are texts in JSON's objects, and reasons. Raises ValueError."""
    return {int(bucket): text(reason) for bucket, reason in mapping(value).items()}


def _bounds(value: Any) -> tuple[int, int]:
    low, high = sequence(value, 2)
    return whole(low), whole(high)


def _decided(value: Any) -> DecidedBox:
    data = mapping(value)
    return DecidedBox(box_from_json(data), field(data, "reason", reason_from_json), field(data, "speedup", number))


def _excluded(value: Any) -> Excluded:
    bucket, candidate, reason, detail = sequence(value, 4)
    return Excluded(whole(bucket), candidate_from_json(candidate), reason_from_json(reason), text(detail))


_READERS: dict[str, Callable[[Any], Any]] = {
    "key": check_key,
    "created": text,
    "default": candidate_from_json,
    "buckets": lambda v: each(v, whole),
    "boxes": lambda v: each(v, _decided),
    "unmeasured": unmeasured_from_json,
    "excluded": lambda v: each(v, _excluded),
    "refused": lambda v: {name: text(reason) for name, reason in mapping(v).items()},
    "seconds": number,
}
