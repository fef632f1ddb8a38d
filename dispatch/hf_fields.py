"""Typed reading of a config.json: a value of the declared type, or a ModelError that names the field."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dispatch.errors import ModelError

_LARGEST_INT = 2**31 - 1  # kernels count tokens and strides in int32
_SHOWN = reprlib.Repr()
_SHOWN.maxlevel = _SHOWN.maxlist = _SHOWN.maxdict = 2  # a hint of what is there; the file has the rest


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of one config; `source` says in errors where they come from.

    A field that is absent or null reads as None. Every method raises ModelError for a value of another type.
    """

    source: str
    values: Mapping[str, Any]

    def integer(self, name: str, low: int = 1, high: int = _LARGEST_INT) -> int | None:
        """A whole number from `low` to `high`, both included."""
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(name, f"must be a whole number from {low} to {high}")
        return value

    def positive(self, name: str) -> float | None:
        """A finite number above 0."""
        value = self.values.get(name)
        if value is None:
            return None
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not 0 < value <= sys.float_info.max  # also false for NaN; exact for an int of any size
        ):
            raise self.error(name, "must be a finite number above 0")
        return float(value)

    def boolean(self, name: str) -> bool | None:
        """true or false."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.error(name, "must be true or false")
        return value

    def text(self, name: str) -> str | None:
        """A string."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise self.error(name, "must be a string")
        return value

    def names(self, name: str) -> Sequence[str] | None:
        """A list of strings."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(name, "must be a list of strings")
        return value

    def require(self, *names: str) -> None:
        """Raises ModelError that lists those of `names` that are absent or null."""
        missing = [name for name in names if self.values.get(name) is None]
        if missing:
            raise ModelError(f"{self.source}: missing {', '.join(missing)}")

    def refuse(self, reasons: Mapping[str, str]) -> None:
        """Raises ModelError with the reason for the first of these fields that is set and not empty."""
        for name, reason in reasons.items():
            if self.values.get(name):
                raise self.error(name, f"not served: {reason}")

    def error(self, name: str, reason: str) -> ModelError:
        """The error for a field, with its value cut to a readable length."""
        return ModelError(f"{self.source}: {name}={_SHOWN.repr(self.values.get(name))}: {reason}")
