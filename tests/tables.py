"""Samples made from tables of true times, for tests of the deciding rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dispatch.evidence import Evidence
from dispatch.samples import TWIN, BucketSamples, Cell, Exclusion
from dispatch.subcells import Subcells

ROUNDS = 15
DEFAULT = "fa3"
PRIORITY = ("fa3", "flashinfer_fa2_tc", "flashinfer_xqa", "flashinfer_cudnn")


def bucket_of(
    times: Mapping[str, object],
    cells: Sequence[Cell] | None = None,
    bucket: int = 8,
    exclusions: Sequence[Exclusion] = (),
) -> BucketSamples:
    """Step times of one layer, {candidate: [cell][round] or [cell] or a number}; the default first.

    The twin is the default's times unless it is given.
    """
    tables = {DEFAULT: times[DEFAULT], TWIN: times.get(TWIN, times[DEFAULT])}
    tables |= {name: table for name, table in times.items() if name not in tables}
    arrays = {name: np.asarray(table, dtype=float) for name, table in tables.items()}
    num_cells = max((a.shape[0] for a in arrays.values() if a.ndim), default=1)
    full = {}
    for name, a in arrays.items():
        a = a.reshape(-1, 1) if a.ndim == 1 else a
        full[name] = np.broadcast_to(a, (num_cells, max(ROUNDS, a.shape[1] if a.ndim == 2 else 1)))
    layer = np.stack(list(full.values()))
    if cells is None:
        cells = [Cell(1000 * (i + 1), 1000 * (i + 1), "equal") for i in range(num_cells)]
    zero = np.zeros_like(layer)
    longest = np.array([[cell.max_kv] * layer.shape[2] for cell in cells])
    means = np.array([[cell.mean_kv] * layer.shape[2] for cell in cells])
    times = np.stack([zero, zero, layer])
    return BucketSamples(bucket, tuple(cells), tuple(full), times, longest, means, tuple(exclusions))


def evidence_of(times: Mapping[str, object], exclusions: Sequence[Exclusion] = ()) -> Evidence:
    """The same, prepared for the rule."""
    return prepared(bucket_of(times, exclusions=exclusions))


def prepared(samples: BucketSamples, num_layers: int = 1, priority: Sequence[str] = PRIORITY) -> Evidence:
    """A bucket's samples as the rule sees them."""
    parts = Subcells.of(samples)
    return Evidence.of(parts.split(samples), parts, num_layers, priority)
