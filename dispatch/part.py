"""A part of a bucket's (mean KV, skew) plane while it is being cut."""

from __future__ import annotations

from dataclasses import dataclass

Ends = tuple[int | None, int | None]
"""Of the mean KV and of the skew; None where no cut bounds that side."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some cells (indices) with the cuts around them, both inclusive."""

    cells: tuple[int, ...]
    low: Ends = (None, None)
    high: Ends = (None, None)


def with_end(ends: Ends, axis: int, value: int) -> Ends:
    """The same with another end on one axis."""
    return (value, ends[1]) if axis == 0 else (ends[0], value)
