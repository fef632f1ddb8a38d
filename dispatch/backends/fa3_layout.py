"""Where FA3 keeps its schedule, and how many tokens a block of its kernel has, found out by asking it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Ints = NDArray[np.int64]

ROUNDED_TO = 4  # rows, of each vector of the metadata
# What FA3 takes on an H200, in half blocks, beside its tiles: to launch, to add up as many parts as there are SMs, and
# for each part of the row that has most. So its times on batches of traces are told to 1% to 4%
# (smoke/results/h200/balance.txt).
COSTS = {"launch": 6.5, "per_wave": 1.9, "per_part_added": 0.08}
MARGIN = np.float32(1.1)  # over an SM's share, of a part
BLOCK_TOKENS = range(32, 257, 16)
# Rows of batches to ask with, which are split into many parts: none a multiple of what vectors are rounded to.
PROBES = (5, 1) * 24
LONGEST_PROBE = 6007  # tokens; a prime, so that all lengths differ
COMPARED_WAVES = 3  # of tiles that are not split, above which it matters little how they are
COMPARED_ROWS = 128  # above so many, comparing sizes of parts takes longer than it saves
SORTED_ROWS = 512  # that are sorted by their longest part


class UnknownLayout(RuntimeError):
    """This build of FA3 keeps its schedule in another way."""


def rounded(rows: int) -> int:
    """Entries of a vector of the metadata: the parts of each row, and what else a build keeps for each. Behind them is
    one counter."""
    return -(-rows // ROUNDED_TO) * ROUNDED_TO


@dataclass(frozen=True, slots=True)
class Layout:
    """Which vectors of the metadata a build keeps where rows are split; others have rows of queries, or heads that
    share the cache.

    `vectors`: how many there are. `parts`: into how many parts each row is split. `order`: the rows in the order in
    which the kernel takes them, by their longest part, which is that of `parts` too; None: it takes them as they come.
    """

    vectors: tuple[int, ...]
    parts: int
    order: int | None


TOKENSPEED = Layout((3, 4), 0, 2)
VLLM = Layout((2, 3), 1, None)  # 0.26.0


def compares(batch: int, heads: int, units: int) -> bool:
    """Whether it pays to look for another size of parts than FA3's own, for so many rows, KV heads and SMs."""
    return batch <= COMPARED_ROWS and batch * heads <= COMPARED_WAVES * units


def own_parts(blocks: Ints, heads: int, units: int, most_splits: int) -> Ints:
    """Into how many parts FA3 splits rows of so many blocks: FA3's hopper/flash_prepare_scheduler.cu."""
    size = int(np.ceil(np.float32(blocks.sum()) * MARGIN * np.float32(heads) / np.float32(units)))
    parts: Ints = np.clip(-(-blocks // size), 1, most_splits)
    return parts


def block_tokens(
    schedule: Callable[[torch.Tensor], torch.Tensor], heads: int, units: int, most_splits: int, layout: Layout
) -> int:
    """Tokens of a block, for which what `schedule` writes for some lengths is what the layout says.

    `schedule`: lengths, int32 [rows] on the CPU, to FA3's metadata, int32, on the CPU. Raises UnknownLayout.
    """
    possible = set(BLOCK_TOKENS)
    in_no_order: Ints = 1 + np.arange(sum(PROBES), dtype=np.int64) * 7919 % LONGEST_PROBE
    for lengths in np.split(in_no_order, np.cumsum(PROBES)[:-1]):
        metadata = schedule(torch.from_numpy(lengths).int()).numpy().astype(np.int64)
        possible = {t for t in possible if _explains(metadata, -(-lengths // t), heads, units, most_splits, layout)}
    if not possible:
        raise UnknownLayout("this build of FA3 keeps its schedule in another way")
    return min(possible)


def _explains(metadata: Ints, blocks: Ints, heads: int, units: int, most_splits: int, layout: Layout) -> bool:
    """Whether rows of so many blocks have this schedule."""
    rows, vector = len(blocks), rounded(len(blocks))
    count, counter = divmod(len(metadata), vector)
    if counter != 1 or count not in layout.vectors:
        return False
    own, parts = own_parts(blocks, heads, units, most_splits), metadata[layout.parts * vector :][:rows]
    if layout.order is None:
        return np.array_equal(own, parts)
    order = metadata[layout.order * vector :][:rows]
    if not np.array_equal(np.sort(order), np.arange(rows)):
        return False
    longest = -(-blocks // own)[order]
    return np.array_equal(own[order], parts) and bool((np.diff(longest) <= 0).all())
