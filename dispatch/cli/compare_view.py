"""A comparison as tables for a terminal: one of each trace, and what they come to."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dispatch.bench.compare import BEST, BEST_FIXED, EQUAL_PLAN
from dispatch.bench.compare_summary import LARGE_BYTES, Below, Speeds, Summary
from dispatch.bench.comparison import Comparison
from dispatch.cli.render import short

HEADS = {EQUAL_PLAN: "equal length plan", BEST: "best of each"}
LEGEND = (
    "over: how many times faster the plan is, geometric mean and below it the worst snapshot; plan() counts. slower:"
    " share of snapshots slower than the default by over 1%, and below it by over 3%. noise: the default's second run"
    " over its first. floor: the time that reading the KV caches takes at least, over the plan's. fit: share of batches"
    " that the KV cache can hold."
)


def comparison_view(comparison: Comparison) -> RenderableType:
    """The tables, the sums, and what was left out and why."""
    plan = comparison.plan
    parts: list[RenderableType] = [
        Text(f"{comparison.path}: {plan.spec.describe()}", style="bold"),
        Text(f"plain reads: {comparison.read_bytes_per_s / 1e9:.0f} GB/s; {comparison.rounds} rounds"),
    ]
    arms = [arm for arm in comparison.arms if arm != BEST_FIXED]
    parts += [_table(comparison, trace, arms) for trace in comparison.traces]
    parts.append(Text(LEGEND, style="dim"))
    parts += [Text(f"refused: {name}: {why}", style="dim") for name, why in comparison.refused.items()]
    parts += [Text(f"left out: {line}", style="red") for line in comparison.left_out]
    sums = {trace: comparison.of_trace(trace) for trace in comparison.traces} | {"all": comparison.snapshots}
    for name, snapshots in sums.items():
        if summary := comparison.summary(snapshots):
            parts.append(Text(f"{name}: {_sum(summary, plan.default)}", style="bold"))
    return Group(*parts)


def _table(comparison: Comparison, trace: str, arms: Sequence[str]) -> Table:
    table = Table(title=trace, title_justify="left")
    for heading in ("batch", "mean KV"):
        table.add_column(heading, justify="right")
    for arm in arms:
        table.add_column("over " + HEADS.get(arm, short(arm)), justify="right")
    for heading in ("slower", "noise", "floor"):
        table.add_column(heading, justify="right")
    for row in (row for row in comparison.rows if row.trace == trace):
        batch = str(row.batch) + (f"\n{row.share_that_fits:.0%} fit" if row.share_that_fits < 1 else "")
        if summary := comparison.summary(row.snapshots):
            middle = sorted(snapshot.mean_kv for snapshot in row.snapshots)[len(row.snapshots) // 2]
            table.add_row(batch, str(middle), *_numbers(summary, arms))
        else:
            table.add_row(batch, "" if row.share_that_fits == 0 else "not timed")
    if whole := comparison.summary(comparison.of_trace(trace)):
        table.add_section()
        table.add_row("all", "", *_numbers(whole, arms))
    return table


def _numbers(summary: Summary, arms: Sequence[str]) -> list[str]:
    speeds = [_speeds(summary.plan_over.get(arm)) for arm in arms]
    return [*speeds, _shares(summary.below), _speeds(summary.noise), f"{summary.floor_share:.0%}"]


def _speeds(speeds: Speeds | None) -> str:
    return "-" if speeds is None else f"{speeds.mean:.3f}\n{speeds.worst:.3f}"


def _shares(below: Sequence[Below]) -> str:
    return "\n".join(f"{each.share:.1%}" for each in below)


def _sum(summary: Summary, default: str) -> str:
    """One line."""
    over, best, large = summary.plan_over[default], summary.plan_over.get(BEST), summary.large
    slower = [f"{b.share:.1%} ({b.surely:.1%} to {b.possibly:.1%}) below {b.limit}x" for b in summary.below]
    noise = ", ".join(f"{each.share:.1%}" for each in summary.noise_below)
    parts = [
        f"{over.mean:.3f}x over {default}, worst {over.worst:.3f}x, of {summary.snapshots} snapshots",
        f"{', '.join(slower)} ({default} beside itself: {noise})",
    ]
    if best is not None:
        parts.append(f"{best.mean:.3f}x over the best of each")
    if large is not None:
        parts.append(
            f"{large.mean:.3f}x, worst {large.worst:.3f}x, over the best backend of each in {large.snapshots} with over"
            f" {LARGE_BYTES / 1e6:.0f} MB of KV a layer"
        )
    return "; ".join(parts)
