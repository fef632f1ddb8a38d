"""A part of a bucket's (mean KV, skew) plane while it is being cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Ends = tuple[int | None, int | None]
"""Of the mean KV and of the skew; None where no cut bounds that side."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some cells (indices) with the cuts around them, both inclusive."""

    cells: tuple[int, ...]
    low: Ends = (None, None)
    high: Ends = (None, None)

    def cut(self, axis: int, end: int, is_below: Sequence[bool]) -> tuple[Part, Part]:
        """In two, behind `end` of an axis (0: the mean, 1: the skew)."""
        below = tuple(i for i, low in zip(self.cells, is_below, strict=True) if low)
        above = tuple(i for i, low in zip(self.cells, is_below, strict=True) if not low)
        return Part(below, self.low, _with(self.high, axis, end)), Part(
            above, _with(self.low, axis, end + 1), self.high
        )


def _with(ends: Ends, axis: int, value: int) -> Ends:
    return (value, ends[1]) if axis == 0 else (ends[0], value)
