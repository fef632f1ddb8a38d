"""The plan file: the plans of a model's layer groups as checked JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from dispatch.atomic import write_atomically
from dispatch.candidate import Candidate
from dispatch.decision import Reason
from dispatch.errors import DispatchError, PlanFileError
from dispatch.key import digest
from dispatch.plainjson import field, mapping, number, parse, sequence, shown, text, whole
from dispatch.plan import DecidedBox, Excluded, StoredPlan
from dispatch.samples import Box

FORMAT = 1


def write_plans(path: Path, plans: Sequence[StoredPlan]) -> None:
    """Write a plan file with its checksum. Raises OSError."""
    body = {"format": FORMAT, "plans": [plan_to_json(plan) for plan in plans]}
    write_atomically(path, json.dumps({**body, "checksum": digest(body)}, indent=1).encode() + b"\n")


def read_plans(path: Path) -> tuple[StoredPlan, ...]:
    """Read a plan file. Raises PlanFileError, naming file and field, for whatever is wrong with it."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise PlanFileError(f"{path}: {error.strerror}") from None
    body = parse(content, path, PlanFileError)
    checksum = body.pop("checksum", None)
    if body.get("format") != FORMAT:
        raise PlanFileError(f"{path}: format: {shown(body.get('format'))}; this version reads {FORMAT}")
    try:
        if digest(body) != checksum:
            raise ValueError("checksum: the file was changed or damaged")
        plans = sequence(field(body, "plans"))
        return tuple(plan_from_json(mapping(plan)) for plan in plans)
    except (DispatchError, ValueError, RecursionError) as error:
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


def plan_from_json(data: Mapping[str, Any]) -> StoredPlan:
    """Inverse of `plan_to_json`, checked as far as making the table. Raises PlanFileError, naming the field."""
    values = {}
    for name in (f.name for f in fields(StoredPlan)):
        values[name] = _checked(name, lambda name=name: _READERS[name](field(dict(data), name)))  # type: ignore[misc]
    plan = StoredPlan(**values)
    _checked("key.spec", lambda: plan.spec)
    _checked("key.backends", lambda: mapping(field(dict(plan.key), "backends")))
    _checked("boxes", plan.table)
    return plan


def box_to_json(box: Box) -> dict[str, Any]:
    """{"bucket": 8, "mean_kv": [128, 900], "max_kv": [128, 4096], "candidate": "fa3"}"""
    return {
        "bucket": box.bucket,
        "mean_kv": [box.mean_kv_min, box.mean_kv_max],
        "max_kv": [box.max_kv_min, box.max_kv_max],
        "candidate": box.candidate,
    }


def box_from_json(value: Any) -> Box:
    """Inverse of `box_to_json`. Raises ValueError or DispatchError."""
    data = mapping(value)
    mean_kv_min, mean_kv_max = (whole(n) for n in sequence(field(data, "mean_kv"), 2))
    max_kv_min, max_kv_max = (whole(n) for n in sequence(field(data, "max_kv"), 2))
    candidate = str(Candidate.parse(text(field(data, "candidate"))))
    return Box(whole(field(data, "bucket")), mean_kv_min, mean_kv_max, max_kv_min, max_kv_max, candidate)


def reason_from_json(value: Any) -> Reason:
    """A reason by its name. Raises ValueError."""
    if value not in Reason.__members__:
        raise ValueError(f"{shown(value)} is not a reason")
    return Reason[value]


def _decided(value: Any) -> DecidedBox:
    data = mapping(value)
    return DecidedBox(box_from_json(data), reason_from_json(field(data, "reason")), number(field(data, "speedup")))


def _excluded(value: Any) -> Excluded:
    bucket, candidate, reason, detail = sequence(value, 4)
    return Excluded(whole(bucket), str(Candidate.parse(text(candidate))), reason_from_json(reason), text(detail))


def _checked(name: str, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (DispatchError, ValueError, TypeError) as error:
        raise PlanFileError(f"{name}: {error}") from None


_READERS: dict[str, Callable[[Any], Any]] = {
    "key": mapping,
    "created": text,
    "default": lambda v: str(Candidate.parse(text(v))),
    "buckets": lambda v: tuple(whole(n) for n in sequence(v)),
    "boxes": lambda v: tuple(_decided(box) for box in sequence(v)),
    "unmeasured": lambda v: {int(bucket): text(reason) for bucket, reason in mapping(v).items()},
    "excluded": lambda v: tuple(_excluded(e) for e in sequence(v)),
    "refused": lambda v: {name: text(reason) for name, reason in mapping(v).items()},
    "seconds": number,
}
