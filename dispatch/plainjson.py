"""Reading plain data strictly: each function returns the value in its type, or raises ValueError saying what it is."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from dispatch.errors import DispatchError

T = TypeVar("T")
# What the objects behind a text's marks take at most, in bytes, on a 64-bit Python: an object with a field and a list;
# a value and its place; half of a string; the places of a key. Samples, which are mostly times, come to 6 to 10 times
# their text, and a list of empty lists to 40.
_MARK_BYTES = {b"{": 200, b"[": 80, b",": 40, b'"': 32, b":": 80}
_MOST_TIMES = 16
# The field that only files of this kind have, for whoever names a file of another.
_KINDS = {
    "plans": "a plan file, which `show` and `explain` read",
    "runs": "a samples file, which `select` reads",
    "quarantined": "a quarantine, which `doctor` lists",
}
_SMALL_BYTES = 1 << 20  # what is not worth a refusal
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = 60  # a mistyped name should still be recognised


def whole(value: Any) -> int:
    """A whole number of 64 bits; bool is none."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{shown(value)} is not a whole number")
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{shown(value)} does not fit into 64 bits")
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


def each(value: Any, reader: Callable[[Any], T]) -> tuple[T, ...]:
    """A JSON array whose items are all read by `reader`."""
    return tuple(reader(item) for item in sequence(value))


def field(data: dict[str, Any], name: str, reader: Callable[[Any], T]) -> T:
    """A field that must be there, read by `reader`."""
    if name not in data:
        raise ValueError(f"{name}: missing")
    return named(name, lambda: reader(data[name]))


def named(name: str, read: Callable[[], T]) -> T:
    """What `read` returns. Raises ValueError that begins with the name where it raises one, or our own."""
    try:
        return read()
    except (DispatchError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from None


def shown(value: Any) -> str:
    """A value for a message, cut short."""
    full = _SHOWN.repr(value)
    return full if len(full) <= 60 else full[:57] + "..."


def load(content: bytes) -> Any:
    """json.loads. Raises ValueError as well where a text would take many times its own size in memory."""
    needed_bytes = sum(size * content.count(mark) for mark, size in _MARK_BYTES.items())
    if needed_bytes > _MOST_TIMES * len(content) + _SMALL_BYTES:
        raise ValueError("too many values for its size: they would take many times as much memory")
    return json.loads(content)


def parse(content: bytes, path: Path, holds: str, version: int, error: type[DispatchError]) -> dict[str, Any]:
    """A JSON object from a file's content, of the kind that `holds` this field, and of the format version given.

    Raises `error`, naming the file.
    """
    try:
        body = mapping(load(content))
    except (ValueError, RecursionError) as problem:
        raise error(f"{path}: not JSON that can be read: {problem}") from None
    for own, kind in _KINDS.items():
        if own in body and own != holds:
            raise error(f"{path}: this is {kind}")
    if body.get("format") != version:
        raise error(f"{path}: format: {shown(body.get('format'))}; this version reads {version}")
    return body
