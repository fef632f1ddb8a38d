"""Plans as tables and a heat map for a terminal."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from dispatch.decision import Reason
from dispatch.plan import StoredPlan
from dispatch.samples import EVEN, Cell, Samples

COLOURS = ("green", "cyan", "magenta", "yellow", "blue", "red", "bright_green", "bright_cyan")
DEFAULT_MARK = "·"
MISS_MARK = " "
WIDTH = 120  # where no terminal tells
FULL = "full"  # the mean KV of a full server, which differs from bucket to bucket


def console(stderr: bool = False) -> Console:
    """Standard output, or error; wide enough for the tables where it is a file or a pipe and COLUMNS is not set."""
    out = Console(stderr=stderr)
    told = os.environ.get("COLUMNS", "").isdecimal()  # as rich reads it
    return out if told or out.is_terminal else Console(width=WIDTH, stderr=stderr)


def short(candidate: str) -> str:
    """A candidate as a table's head."""
    return candidate.removeprefix("flashinfer_")


def phases_view(seconds: Mapping[str, float]) -> Table:
    """Where the time of a tuning run went, the most first."""
    total = sum(seconds.values())
    table = Table(caption=f"{total:.1f} s in all; kernels are compiled once on a machine")
    table.add_column("time spent on")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    for phase, spent in sorted(seconds.items(), key=lambda item: -item[1]):
        table.add_row(Text(phase), f"{spent:.2f}", f"{spent / total:.0%}")
    return table


def plan_view(plan: StoredPlan, samples: Samples | None) -> RenderableType:
    """The table by bucket and box, the heat map, and what was left out and why."""
    parts: list[RenderableType] = [Text(plan.spec.describe(), style="bold"), box_table(plan)]
    if samples is not None and samples.buckets:
        parts += heat_map(plan, samples)
    parts += left_out(plan)
    return Group(*parts)


def box_table(plan: StoredPlan) -> Table:
    """One row a box: the winner, and what it gains over the default."""
    table = Table(caption=f"default: {plan.default}; gains are scored on rounds that did not choose")
    for title, justify in (("batch", "right"), ("mean KV", "right"), ("longest / mean", "right"), ("backend", "left")):
        table.add_column(title, justify=justify)  # type: ignore[arg-type]
    table.add_column("over default", justify="right")
    table.add_column("why", style="dim")
    for bucket in plan.buckets:
        boxes = [d for d in plan.boxes if d.box.bucket == bucket]
        for decided in boxes:
            box = decided.box
            is_default = box.candidate == plan.default
            table.add_row(
                str(bucket),
                f"{box.mean_kv_min}-{box.mean_kv_max}",
                f"{box.skew_min / EVEN:.2f}-{box.skew_max / EVEN:.2f}",
                Text(box.candidate, style="" if is_default else "bold green"),
                "" if is_default else f"{decided.speedup:.2f}x",
                "no other is stably faster" if is_default else decided.reason.value,
            )
        if not boxes:
            reason = plan.unmeasured.get(bucket, Reason.NOT_MEASURED.value)
            table.add_row(str(bucket), "", "", plan.default, "", reason, style="dim")
    return table


def heat_map(plan: StoredPlan, samples: Samples) -> list[RenderableType]:
    """Batch by mean KV; in each field one letter a length profile, in the order of the legend."""
    names = list(dict.fromkeys(d.box.candidate for d in plan.boxes if d.box.candidate != plan.default))
    marks = {name: (chr(ord("A") + i), COLOURS[i % len(COLOURS)]) for i, name in enumerate(names)}
    profiles = list(dict.fromkeys(cell.profile for b in samples.buckets for cell in b.cells))
    grid = plan.key.get("grid", [])
    table = Table(title="winners", box=None, padding=(0, 1))
    table.add_column("batch", justify="right")
    columns = [str(point) for point in grid if any(c.mean_kv == point for b in samples.buckets for c in b.cells)]
    if any(c.mean_kv not in grid for b in samples.buckets for c in b.cells):
        columns.append(FULL)
    for column in columns:
        table.add_column(column, justify="center")
    for bucket in samples.buckets:
        fields: dict[str, dict[str, Cell]] = {}
        for cell in bucket.cells:
            fields.setdefault(str(cell.mean_kv) if cell.mean_kv in grid else FULL, {})[cell.profile] = cell
        row = (_field(plan, bucket.bucket, [fields.get(c, {}).get(p) for p in profiles], marks) for c in columns)
        table.add_row(str(bucket.bucket), *row)
    legend = Text(f"{DEFAULT_MARK} {plan.default} (the default)")
    for name, (letter, colour) in marks.items():
        legend.append("  ")
        legend.append(letter, style=f"bold {colour}")
        legend.append(f" {name}")
    return [table, legend, Text(f"length profiles, left to right: {', '.join(profiles)}", style="dim")]


def _field(plan: StoredPlan, bucket: int, cells: Sequence[Cell | None], marks: Mapping[str, tuple[str, str]]) -> Text:
    field = Text()
    boxes = [d.box for d in plan.boxes if d.box.bucket == bucket]
    for cell in cells:
        box = next((box for box in boxes if cell is not None and box.holds(cell.mean_kv, cell.max_kv)), None)
        if box is None:
            field.append(MISS_MARK)
        elif box.candidate in marks:
            letter, colour = marks[box.candidate]
            field.append(letter, style=f"bold {colour}")
        else:
            field.append(DEFAULT_MARK)
    return field


def left_out(plan: StoredPlan) -> list[RenderableType]:
    """Backends that do not serve the layer, and candidates that failed, with their reasons."""
    lines: list[RenderableType] = [Text(f"refused: {name}: {why}", style="dim") for name, why in plan.refused.items()]
    by_reason: dict[tuple[str, str], list[str]] = {}
    for e in plan.excluded:
        by_reason.setdefault((e.candidate, f"{e.reason.value}: {e.detail}"), []).append(str(e.bucket))
    for (candidate, why), buckets in by_reason.items():
        lines.append(Text(f"excluded at batch {', '.join(dict.fromkeys(buckets))}: {candidate}: {why}", style="red"))
    return lines
