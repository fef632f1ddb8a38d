"""Reading plain data strictly: each function returns the value in its type, or raises ValueError saying what it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dispatch.errors import DispatchError


def whole(value: Any) -> int:
    """A whole number; bool is none."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{shown(value)} is not a whole number")
    return value


def number(value: Any) -> float:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -1e300 < value < 1e300:
        raise ValueError(f"{shown(value)} is not a number")
    return float(value)


def text(value: Any) -> str:
    """A string."""
    if not isinstance(value, str):
        raise ValueError(f"{shown(value)} is not a text")
    return value


def mapping(value: Any) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise ValueError(f"{shown(value)} is not an object")
    return value


def sequence(value: Any, length: int | None = None) -> list[Any]:
    """A JSON array, of `length` items if given."""
    if not isinstance(value, list) or (length is not None and len(value) != length):
        raise ValueError(f"{shown(value)} is not a list" + ("" if length is None else f" of {length}"))
    return value


def field(data: dict[str, Any], name: str) -> Any:
    """A field that must be there."""
    if name not in data:
        raise ValueError(f"{name}: missing")
    return data[name]


def shown(value: Any) -> str:
    """A value for a message, cut short."""
    full = repr(value)
    return full if len(full) <= 60 else full[:57] + "..."


def parse(content: bytes, path: Path, error: type[DispatchError]) -> dict[str, Any]:
    """A JSON object from a file's content. Raises `error`, naming the file."""
    try:
        return mapping(json.loads(content))
    except (ValueError, RecursionError) as problem:
        raise error(f"{path}: not JSON that can be read: {problem}") from None
