"""What a plan is valid for: everything that could change the answer, as plain data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from dispatch.grid import check_buckets
from dispatch.plainjson import each, field, mapping, shown, text, whole
from dispatch.spec import AttentionSpec

RULE_VERSION = 3  # raised when the deciding rule or the way of measuring changes


def canonical(data: Any) -> bytes:
    """The one JSON text of plain data."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest(data: Any) -> str:
    """SHA-256 of the canonical text, in hex."""
    return hashlib.sha256(canonical(data)).hexdigest()


def check_key(value: Any) -> dict[str, Any]:
    """A key out of a file, with the fields that deciding and the table need. Raises ValueError, naming the field."""
    key = mapping(value)
    field(key, "spec", AttentionSpec.from_json)
    field(key, "buckets", lambda buckets: check_buckets(each(buckets, whole)))
    field(key, "backends", _check_versions)
    return key


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """One line for each field that differs, in our order."""
    return [f"{name}: the plan has {a!r}, here it is {b!r}" for name, a, b in differing(theirs, ours)]


def differing(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """The name, their value and ours of each field that differs, in our order; "nothing" for one that is not there."""
    a, b = _flat(theirs), _flat(ours)
    names = [*b, *(name for name in a if name not in b)]
    return [
        (name, a.get(name, "nothing"), b.get(name, "nothing"))
        for name in names
        if a.get(name) != b.get(name) or (name in a) != (name in b)
    ]


def _check_versions(value: Any) -> None:
    for name, version in mapping(value).items():
        if not name.isascii():
            raise ValueError(f"{shown(name)}: a backend name must be ASCII")
        text(version)


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in data.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat
