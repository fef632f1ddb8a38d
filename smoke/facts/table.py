"""What a fact found: rows for people, raw medians for machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

WIDTH = 180  # also where the output is not a terminal


@dataclass(frozen=True)
class Row:
    """A line of the table. `then`: what DESIGN 2 says, and out of which of its data; `now`: the same, measured now."""

    fact: str
    then: str
    now: str
    note: str = ""


@dataclass(frozen=True)
class Found:
    """What one fact gives: rows, and medians as plain data."""

    rows: tuple[Row, ...]
    raw: Mapping[str, Any] = field(default_factory=dict)


def listed(values: Mapping[str, float], digits: int = 1) -> str:
    """Names with their numbers: "cudnn 253.1, fa3 259.0"."""
    return ", ".join(f"{name} {value:.{digits}f}" for name, value in values.items())


def show(rows: Sequence[Row], title: str) -> None:
    """Print the one table."""
    table = Table("fact", "then", "now", "note", title=title, show_lines=True)
    for row in rows:
        table.add_row(row.fact, row.then, row.now, row.note)
    Console(width=WIDTH, markup=False).print(table)
