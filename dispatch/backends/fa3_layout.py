"""Where FA3 keeps its schedule, and how many tokens a block of its kernel has, found out by asking it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

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
COMPARED_WAVES = 3  # of tiles that are not split, above which it matters little how they are
COMPARED_ROWS = 128  # above so many, comparing sizes of parts takes longer than it saves
SORTED_ROWS = 512  # that are sorted by their longest part
LONGEST_PROBE = 6007  # tokens; a prime, so that all lengths differ


class UnknownLayout(RuntimeError):
    """This build of FA3 keeps its schedule in another way."""


def rounded(rows: int) -> int:
    """Entries of a vector of the metadata: the parts of each row, and what else a build keeps for each. Behind them is
    one counter."""
    return -(-rows // ROUNDED_TO) * ROUNDED_TO


@dataclass(frozen=True, slots=True)
class Layout:
    """Which vector of the metadata holds what.

    `block_tokens`: of a block of FA3's kernel. `parts`: into how many parts each row is split; None: no row is.
    `order`: the rows in the order in which the kernel takes them, by their longest part, which is that of `parts` too;
    None: it takes them as they come.
    """

    block_tokens: int
    parts: int | None
    order: int | None


NOT_SPLIT = Layout(1, None, None)
"""Of a kernel that takes rows as they come, and splits none: rows by their tokens."""


Kept = tuple[tuple[int, ...], int, int | None]
"""How many vectors a build may keep, and where the parts and the order of rows are. Others, which are not read here,
have the blocks or rows of queries, or the heads that share the cache."""

TOKENSPEED: Kept = ((3, 4), 0, 2)
VLLM: Kept = ((2, 3), 1, None)  # 0.26.0


def compares(batch: int, heads: int, units: int) -> bool:
    """Whether it pays to look for another size of parts than FA3's own, for so many rows, KV heads and SMs."""
    return batch <= COMPARED_ROWS and batch * heads <= COMPARED_WAVES * units


def own_parts(blocks: Ints, heads: int, units: int, most_splits: int) -> Ints:
    """Into how many parts FA3 splits rows of so many blocks: FA3's hopper/flash_prepare_scheduler.cu."""
    size = int(np.ceil(np.float32(blocks.sum()) * MARGIN * np.float32(heads) / np.float32(units)))
    parts: Ints = np.clip(-(-blocks // size), 1, most_splits)
    return parts


def layout_of(schedule: Callable[[torch.Tensor], torch.Tensor], heads: int, units: int, most_splits: int) -> Layout:
    """The layout for which what `schedule` writes for some lengths is the schedule of their blocks.

    `schedule`: lengths, int32 [rows] on the CPU, to FA3's metadata, int32, on the CPU. Raises UnknownLayout.
    """
    possible = list(product(BLOCK_TOKENS, (TOKENSPEED, VLLM)))
    in_no_order: Ints = 1 + np.arange(sum(PROBES), dtype=np.int64) * 7919 % LONGEST_PROBE
    for lengths in np.split(in_no_order, np.cumsum(PROBES)[:-1]):
        metadata = schedule(torch.from_numpy(lengths).int()).numpy().astype(np.int64)
        own = {tokens: own_parts(-(-lengths // tokens), heads, units, most_splits) for tokens in BLOCK_TOKENS}
        possible = [
            (tokens, kept) for tokens, kept in possible if _explains(metadata, -(-lengths // tokens), own[tokens], kept)
        ]
    if not possible:
        raise UnknownLayout("this build of FA3 keeps its schedule in another way")
    tokens, (_, parts, order) = possible[0]
    return Layout(tokens, parts, order)


def _explains(metadata: Ints, blocks: Ints, own: Ints, kept: Kept) -> bool:
    """Whether rows of so many blocks, of which FA3 makes so many parts, have this schedule."""
    vectors, parts, order = kept
    rows, vector = len(blocks), rounded(len(blocks))
    count, counter = divmod(len(metadata), vector)
    if counter != 1 or count not in vectors:
        return False
    found = metadata[parts * vector :][:rows]
    if order is None:
        return np.array_equal(own, found)
    taken = metadata[order * vector :][:rows]
    if not np.array_equal(np.sort(taken), np.arange(rows)):
        return False
    longest = -(-blocks // own)[taken]
    return np.array_equal(own[taken], found) and bool((np.diff(longest) <= 0).all())
