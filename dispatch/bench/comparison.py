"""A whole run of `compare`, as plain data. Pure; needs numpy alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dispatch.bench.compare import Snapshot
from dispatch.bench.compare_summary import Summary, arms_of, summarise
from dispatch.key import digest
from dispatch.plan import StoredPlan


@dataclass(frozen=True, eq=False)
class Row:
    """Snapshots of one trace and batch size. `share_that_fits`: of the batches drawn, into the KV capacity."""

    trace: str
    batch: int
    share_that_fits: float
    snapshots: tuple[Snapshot, ...]


@dataclass(frozen=True, eq=False)
class Comparison:
    """A plan and its rivals. `device`: of the key. `read_bytes_per_s`: of plain reads, just before.

    `refused`: backends that do not serve the layer. `left_out`: a line for each candidate and snapshot that failed.
    """

    path: str
    plan: StoredPlan
    rounds: int
    read_bytes_per_s: float
    rows: tuple[Row, ...]
    refused: Mapping[str, str]
    left_out: tuple[str, ...]

    @property
    def traces(self) -> tuple[str, ...]:
        """Each once, in order."""
        return tuple(dict.fromkeys(row.trace for row in self.rows))

    @property
    def snapshots(self) -> tuple[Snapshot, ...]:
        """All of them."""
        return tuple(snapshot for row in self.rows for snapshot in row.snapshots)

    @property
    def arms(self) -> tuple[str, ...]:
        """What the plan is compared with; the default first."""
        return arms_of(self.snapshots)

    def of_trace(self, trace: str) -> tuple[Snapshot, ...]:
        """Its snapshots, of every batch size."""
        return tuple(snapshot for snapshot in self.snapshots if snapshot.trace == trace)

    def summary(self, snapshots: Sequence[Snapshot]) -> Summary | None:
        """What these say together; None where there are none."""
        layers = self.plan.spec.num_layers
        return summarise(snapshots, layers, self.read_bytes_per_s) if snapshots else None

    def to_json(self) -> dict[str, Any]:
        """Plain data: the summaries, and every snapshot."""
        return {
            "plan": self.path,
            "key_digest": digest(self.plan.key),
            "key": dict(self.plan.key),
            "rounds": self.rounds,
            "read_bytes_per_s": round(self.read_bytes_per_s),
            "all": _json(self.summary(self.snapshots)),
            "traces": {trace: _json(self.summary(self.of_trace(trace))) for trace in self.traces},
            "rows": [
                {
                    "trace": row.trace,
                    "batch": row.batch,
                    "share_that_fits": round(row.share_that_fits, 4),
                    "summary": _json(self.summary(row.snapshots)),
                }
                for row in self.rows
            ],
            "refused": dict(self.refused),
            "left_out": list(self.left_out),
            "snapshots": [snapshot.to_json(self.arms) for snapshot in self.snapshots],
        }


def _json(summary: Summary | None) -> dict[str, Any] | None:
    return None if summary is None else summary.to_json()
