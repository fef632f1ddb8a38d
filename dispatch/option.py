"""Option: one setting, and how a text or a typed value becomes the setting's value."""

from __future__ import annotations

import argparse
import math
import os
import re
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dispatch.errors import ConfigError

_BOOLEANS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}
_BACKEND_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = 80  # a mistyped path should still be recognised


def boolean(value: object) -> bool:
    """True and its synonyms in text, in any case."""
    return value if isinstance(value, bool) else _BOOLEANS[_text(value).strip().lower()]


def fraction(value: object) -> float:
    """A number from 0 up to, not including, 1."""
    number = _number(value)
    if not 0 <= number < 1:
        raise ValueError
    return number


def above_zero(value: object) -> float:
    """A finite number above 0."""
    number = _number(value)
    if not (number > 0 and math.isfinite(number)):
        raise ValueError
    return number


def backend_names(value: object) -> tuple[str, ...]:
    """Names in the order given, each once; a stray comma is no name."""
    if not isinstance(value, (tuple, list)):
        value = [name for name in map(str.strip, _text(value).split(",")) if name]
    if not all(_BACKEND_NAME.fullmatch(name) for name in value):
        raise ValueError
    return tuple(dict.fromkeys(value))


def one_of(*allowed: str) -> Callable[[object], str]:
    """A reader of one of these words, in any case."""

    def read(value: object) -> str:
        word = _text(value).strip().lower()
        if word not in allowed:
            raise ValueError
        return word

    return read


def folder(value: object) -> Path | None:
    """A path, which need not exist; None stays None."""
    if value is None:
        return None
    path = os.fspath(value) if isinstance(value, os.PathLike) else _text(value)
    if not isinstance(path, str) or not path.strip() or "\0" in path:
        raise ValueError
    return Path(os.path.expanduser(path))  # no shell has expanded --flag=~/folder


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise TypeError
    return float(value) + 0.0  # -0.0 becomes 0.0: one value, one key of a stored plan


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One field of DispatchConfig: where it comes from and what is allowed.

    `parse` takes text or a value of the field's own type; it raises ValueError, TypeError, LookupError or
    OverflowError for anything else.
    """

    name: str
    env: str
    flag: str
    parse: Callable[[object], Any]
    allowed: str
    help: str

    @property
    def dest(self) -> str:
        """The attribute of an argparse namespace."""
        return self.flag.removeprefix("--")

    def read(self, source: str, value: object) -> Any:
        """The field's value. Raises ConfigError that names `source`, the value and what is allowed."""
        try:
            return self.parse(value)
        except (ValueError, TypeError, LookupError, OverflowError):
            raise ConfigError(f"{source}={_SHOWN.repr(value)}: must be {self.allowed}") from None

    def read_argument(self, text: str) -> Any:
        """`read` for argparse, which knows only its own error."""
        try:
            return self.read(self.flag, text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
