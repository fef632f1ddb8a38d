"""Batches of a trace: the KV lengths of a full batch at random decode steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dispatch.bench.profiles import FromTrace, PlannedCell
from dispatch.bench.trace import Trace
from dispatch.samples import Cell

SEED = 4
TRIES = 50  # for each batch that is wanted; a server admits no batch that does not fit into its KV cache


def batches(
    trace: Trace, batch: int, count: int, longest: int, num_pages: int, page_size: int, seed: int = SEED
) -> tuple[NDArray[np.int64], float]:
    """Lengths, int64 [at most `count`, batch], of batches that fit into so many pages, and the share that does.

    As a server sees them that replaces a finished request by the next (FromTrace). Requests longer than `longest`
    tokens are cut to it. `seed`: others draw other batches.
    """
    rng = np.random.default_rng([seed, batch])
    drawn = FromTrace(trace).draw(rng, (count * TRIES, batch))
    lengths = np.clip(drawn, 1, longest).astype(np.int64)
    fits = (-(-lengths // page_size)).sum(axis=1) <= num_pages
    return lengths[fits][:count], float(fits.mean())


@dataclass(frozen=True, eq=False)
class Traffic:
    """What was drawn of a trace for a batch size, as `batches` returns it."""

    trace: str
    batch: int
    lengths: NDArray[np.int64]
    share_that_fits: float

    def cells(self, rounds: int) -> tuple[PlannedCell, ...]:
        """A cell for each batch, which has the same lengths in all of its rounds."""
        return tuple(
            PlannedCell(Cell(round(lengths.mean()), int(lengths.max()), self.trace), np.tile(lengths, (rounds, 1)))
            for lengths in self.lengths
        )
