"""What `explain` shows of the samples: the verdicts of a box, and the times nearest to a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from rich.markup import escape
from rich.table import Table

from dispatch.cli.render import short
from dispatch.decision import Decision
from dispatch.evidence import median_of_rounds
from dispatch.samples import BucketSamples

SHOWN_CELLS = 6  # as fit side by side into 120 columns; a box has up to a hundred


def verdicts(decision: Decision, bucket: BucketSamples, default: str) -> Table:
    """One row a candidate: its times against the default's, and what it lost by."""
    title = f"against {escape(default)}, paired by round"
    if decision.candidate != default:
        title += "; all rounds count, those that chose the winner too"
    table = Table(title=title, title_justify="left")
    table.add_column("candidate", no_wrap=True)
    for head in ("time, mean", "time, worst cell", "rounds won"):
        table.add_column(head, justify="right", overflow="fold")
    table.add_column("verdict", overflow="fold")
    for v in decision.verdicts:
        worst = ""
        if v.worst_r is not None and v.worst_cell is not None:
            cell = bucket.cells[v.worst_cell]
            worst = f"{percent(v.worst_r, sign=True)} at {cell.mean_kv}, {cell.profile}"
        table.add_row(
            escape(v.candidate),
            "" if v.mean_r is None else percent(v.mean_r, sign=True),
            worst,
            "" if v.win_share is None else f"{100 * v.win_share:.0f}%",
            escape(v.reason.value + (f" ({v.detail})" if v.detail else "")),
        )
    return table


def times(bucket: BucketSamples, cells: Sequence[int], num_layers: int, kv: int, max_kv: int) -> Table:
    """One row a candidate, in those of `cells` (indices) that are nearest to the batch, the nearest first."""

    def distance(i: int) -> float:
        cell = bucket.cells[i]
        return _apart(cell.mean_kv, kv) + _apart(cell.max_kv / cell.mean_kv, max_kv / kv)

    nearest = sorted(cells, key=distance)[:SHOWN_CELLS]
    title = f"microseconds a step of {num_layers} layers, median of the rounds"
    if len(nearest) < len(cells):
        title += f"; the nearest {len(nearest)} of {len(cells)} cells"
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    for _ in nearest:
        table.add_column(justify="right", overflow="fold")
    shown = [bucket.cells[i] for i in nearest]
    table.add_row("mean KV", *(str(cell.mean_kv) for cell in shown))
    table.add_row("max KV", *(str(cell.max_kv) for cell in shown))
    table.add_row("profile", *(escape(cell.profile) for cell in shown), end_section=True)
    for name, step in zip(bucket.candidates, median_of_rounds(bucket.step_us(num_layers)), strict=True):
        table.add_row(escape(short(name)), *("-" if np.isnan(step[i]) else f"{step[i]:.0f}" for i in nearest))
    return table


def _apart(a: float, b: float) -> float:
    return abs(math.log(a / b))


def percent(log_ratio: float, sign: bool = False) -> str:
    """A log ratio of times as a difference in time."""
    return f"{100 * math.expm1(log_ratio):{'+' if sign else ''}.1f}%"
