"""What a plan is valid for: everything that could change the answer, as plain data."""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections.abc import Mapping
from typing import Any

from dispatch.grid import check_buckets
from dispatch.plainjson import each, field, mapping, shown, text, whole
from dispatch.spec import AttentionSpec

_SAID = reprlib.Repr()
_SAID.maxlist = _SAID.maxstring = 64  # all buckets of most engines; not all of a file that is made to be large
_DEPTH = 3  # of objects in a key; what a file nests deeper is compared as it is

RULE_VERSION = 8  # raised when the deciding rule or the way of measuring changes


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
    """One line for each field that differs, in our order; none only where the canonical texts are equal."""
    return [
        f"{name if name.isprintable() else shown(name)}: the plan has {_SAID.repr(a)}, here it is {_SAID.repr(b)}"
        for name, a, b in differing(theirs, ours)
    ] or ([] if canonical(theirs) == canonical(ours) else ["the plan has the same values in another form"])


def differing(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """The name, their value and ours of each field that differs, in our order; "nothing" for one that is not there."""
    if canonical(theirs) == canonical(ours):
        return []
    a, b = _flat(theirs), _flat(ours)
    names = [*b, *(name for name in a if name not in b)]
    return [
        (name, a.get(name, "nothing"), b.get(name, "nothing"))
        for name in names
        if _typed(a.get(name)) != _typed(b.get(name)) or (name in a) != (name in b)
    ]


def _typed(value: Any) -> tuple[type, Any]:
    return type(value), value  # 1, 1.0 and true are equal in Python, and three keys


def _check_versions(value: Any) -> None:
    for name, version in mapping(value).items():
        if not name.isascii():
            raise ValueError(f"{shown(name)}: a backend name must be ASCII")
        text(version)


def _flat(data: Mapping[str, Any], prefix: str = "", depth: int = _DEPTH) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in data.items():
        if isinstance(value, Mapping) and depth > 1:
            flat.update(_flat(value, f"{prefix}{name}.", depth - 1))
        else:
            flat[prefix + name] = value
    return flat
